"""How a model sees images: into which tiles it cuts them, and what stands for them in a prompt. No torch, no Pillow.

Each family of models has a module in `families`, which is imported only where it is needed. It has:

- a subclass of `Rules`, whose tag is the module's name,
- `read(config, found)`, which makes them of `config.json` and the fields of the model's image processor,
- `TOWERS`, the code of the tower of each architecture.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from radix.node import LEAST_PAD
from runtime.errors import ModelError
from runtime.models.config_json import architecture_of, read_json
from runtime.models.seeing import SEEING

# Modules of `families`.
_FAMILIES = {
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
    "Qwen3_5ForConditionalGeneration": "qwen_vl",
}
# Pillow's filters.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
# Means and deviations of the channels.
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}


Levels = tuple[tuple[float, ...], tuple[float, ...]]


class Rules(msgspec.Struct, frozen=True, tag=True):
    """What the rules of all families say of pixels, and of the rows that show them. Lengths are in pixels.

    Attributes:
        longest: longest edge of the image as a whole, or before it is cut.
        resample: Pillow's number of the filter.
        rescale, mean, std: a pixel's value is (byte x rescale - mean) / std, by channel.
        image: text of the token of a row.
        row: edge of the square of a tile that a row shows.
        mutual: whether the rows of a tile see each other.
        has_axes: whether the positions of rows have three axes.
        added: number of further states of each row, which are added behind as many of the decoder's first layers.
    """

    mutual: ClassVar[bool] = False
    has_axes: ClassVar[bool] = False

    @property
    def added(self) -> int:
        return 0

    longest: int
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image: str
    row: int

    @classmethod
    def of(cls, found: dict[str, Any], resample: int, levels: Levels = _HALVES, **own: Any) -> Self:
        """Rules of the fields of an image processor; `resample`, `levels`: where it has none. `own`: other fields."""
        mean, std = (tuple(found.get(f"image_{name}", one)) for name, one in zip(("mean", "std"), levels, strict=True))
        filter_, rescale = found.get("resample", resample), found.get("rescale_factor", 1 / 255)
        return cls(resample=filter_, rescale=rescale, mean=mean, std=std, **own)

    @property
    def written(self) -> str:
        """The text that chat templates write for an image."""
        return self.image

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """The sizes (width, height) to which an image is resized, one after the other."""
        raise NotImplementedError

    def tiles(self, image: Any) -> list[tuple[Any, tuple[int, ...]]]:
        """The tiles of an image (all of Pillow), each with its size: width, height, and what else `rows` takes."""
        for size in self.sizes(*image.size):
            image = image.resize(size, self.resample)
        return [(image, image.size)]

    def rows(self, width: int, height: int) -> int:
        """The number of rows that show a tile of a size."""
        return (width // self.row) * (height // self.row)

    def text(self, width: int, height: int) -> str:
        """The text that stands for an image in a prompt, which has `self.image` for each row of each tile."""
        raise NotImplementedError


class TowerCode(NamedTuple):
    """transformers' code of an architecture.

    Attributes:
        name: of its modules.
        tower, connector: classes of the tower, and of what makes the decoder's states of its output. If there is no
            connector, the tower makes them, and takes the image in patches.
        prefixes: of their tensors in a checkpoint.
        sized: whether both take the size of the image.
        newline: whether a tile is a grid of crops, with a state of its own behind each line, see `llava_onevision`.
    """

    name: str
    tower: str
    connector: str
    prefixes: tuple[str, ...] = ("model.vision_model.", "model.connector.")
    sized: bool = False
    newline: bool = False


def load_rules(directory: Path) -> Rules | None:
    """The rules of a model; None: it does not see. Raises ModelError."""
    config = read_json(directory / "config.json")
    if (architecture := architecture_of(config)) not in SEEING:
        return None
    if (found := _processor(directory)) is None:
        if architecture == "Qwen3_5ForConditionalGeneration":
            return None  # its decoder alone
        raise ModelError(
            f"{directory} has no preprocessor_config.json, and no image_processor in processor_config.json"
        )
    if wrong := [name for name, value in _FIXED.items() if found.get(name, value) is not value]:
        raise ModelError(f"the model's image processor has {wrong[0]} {found[wrong[0]]!r}, which is not supported")
    try:
        rules: Rules = family_of(architecture).read(config, found)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the image processor of the model in {directory} cannot be read: {error!r}") from None
    return rules


def family_of(architecture: str) -> ModuleType:
    """The module of an architecture's family."""
    return _module(_FAMILIES[architecture])


def as_rules(given: dict[str, Any]) -> Rules:
    """The rules of the fields that msgspec has written."""
    rules: Rules = msgspec.convert(given, _module(given["type"]).RULES)
    return rules


def _module(name: str) -> ModuleType:
    return import_module(f"runtime.features.images.families.{name}")


def up(length: float, unit: int) -> int:
    """The least multiple of `unit` that is no less than a length."""
    return math.ceil(length / unit) * unit


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image as a prompt has it.

    Attributes:
        text: what stands for it, before it is tokenized.
        tiles: for each tile, the negative int32 tokens of its rows, which its pixels alone decide.
        widths: for each tile, the number of rows that show a line of it.
    """

    text: str
    tiles: list[array[int]]
    widths: list[int]


def tokens_of(digest: bytes, rows: int) -> array[int]:
    """The negative int32 tokens of a tile's rows, from a digest of its pixels.

    Each has 31 bits of its own, so that n rows are taken for those of another tile with a probability of 2 ** (-31 n).
    """
    bits = array("i", hashlib.shake_128(digest).digest(4 * rows))
    return array("i", [min(one | -(1 << 31), LEAST_PAD - 1) for one in bits])


def _processor(directory: Path) -> dict[str, Any] | None:
    """The fields of a model's image processor, from the file of old or of new versions; None: it has none."""
    old, new = (directory / name for name in ("preprocessor_config.json", "processor_config.json"))
    found = read_json(old) if old.exists() else read_json(new).get("image_processor") if new.exists() else None
    # Null is what a class has by itself.
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else None
