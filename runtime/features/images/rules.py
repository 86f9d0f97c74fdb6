"""How a model sees images: into which tiles it cuts them, and what stands for them in a prompt. No torch, no Pillow."""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runtime.errors import ModelError
from runtime.models.config_json import architecture_of, positive_size, read_json
from runtime.models.seeing import SEEING

# Longest edge of an image after its first resizing, whatever the model's files say.
_LONGEST = 4096
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}


class Rules(msgspec.Struct, frozen=True):
    """The rules of Idefics 3 and SmolVLM. Lengths are in pixels.

    Attributes:
        longest: longest edge of the image before it is cut.
        tile: edge of a tile, which is square.
        splits: whether larger images are cut; if not, the whole image is one tile.
        rows: rows of a prompt that a tile has.
        resample: Pillow's number of the filter.
        rescale, mean, std: a pixel's value is (byte x rescale - mean) / std, by channel.
        image, edge, whole: texts of the tokens of a row, around tiles, and of the tile with the whole image.
    """

    longest: int
    tile: int
    splits: bool
    rows: int
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image: str = "<image>"
    edge: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    @staticmethod
    def load(directory: Path) -> Rules | None:
        """The rules of a model; None: it does not see. Raises ModelError."""
        config = read_json(directory / "config.json")
        if architecture_of(config) not in SEEING:
            return None
        found = _processor(directory)
        if wrong := [name for name, value in _FIXED.items() if found.get(name, value) is not value]:
            raise ModelError(f"the model's image processor has {wrong[0]} {found[wrong[0]]!r}, which is not supported")
        try:
            vision, tile = config["vision_config"], found["max_image_size"]["longest_edge"]
            edge = tile // (positive_size(vision, "patch_size", 32) * positive_size(config, "scale_factor", 2))
            return Rules(
                longest=found["size"]["longest_edge"],
                tile=tile,
                splits=found.get("do_image_splitting", True),
                rows=edge * edge,
                resample=found.get("resample", 1),
                rescale=found.get("rescale_factor", 1 / 255),
                mean=tuple(found.get("image_mean", (0.5, 0.5, 0.5))),
                std=tuple(found.get("image_std", (0.5, 0.5, 0.5))),
            )
        except (KeyError, TypeError) as error:
            raise ModelError(f"the image processor of the model in {directory} cannot be read: {error!r}") from None

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """The sizes (width, height) to which an image is resized, one after the other, before it is cut."""
        first = _bounded(*_fitted(width, height, self.longest))
        if not self.splits:
            return [first, (self.tile, self.tile)]
        width, height = first
        ratio = width / height
        if width >= height:
            width = self._up(width)
            height = self._up(int(width / ratio))
        else:
            height = self._up(height)
            width = self._up(int(height * ratio))
        return [first, (width, height)]

    def _up(self, length: int) -> int:
        return math.ceil(length / self.tile) * self.tile

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles before the tile with the whole image; (0, 0): it is the only one."""
        width, height = self.sizes(width, height)[-1]
        rows, columns = height // self.tile, width // self.tile
        return (0, 0) if rows * columns == 1 else (rows, columns)

    def text(self, rows: int, columns: int) -> str:
        """The text that stands for an image in a prompt, in which each tile has `self.rows` times `self.image`."""
        row, cut = self.image * self.rows, ""
        for i in range(1, rows + 1):
            cut += "".join(f"{self.edge}<row_{i}_col_{j}>{row}" for j in range(1, columns + 1)) + "\n"
        return f"{cut}{cut and chr(10)}{self.edge}{self.whole}{row}{self.edge}"


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """An image as a prompt has it.

    Attributes:
        text: what stands for it, before it is tokenized.
        tiles: for each tile, the negative int32 tokens of its rows, which its pixels alone decide.
    """

    text: str
    tiles: list[array[int]]

    @property
    def num_tokens(self) -> int:
        """The least number of tokens that it has."""
        return sum(map(len, self.tiles))


def tokens_of(digest: bytes, rows: int) -> array[int]:
    """The negative int32 tokens of a tile's rows, from a digest of its pixels.

    Each has 31 bits of its own, so that n rows are taken for those of another tile with a probability of 2 ** (-31 n).
    """
    bits = array("i", hashlib.shake_128(digest).digest(4 * rows))
    return array("i", [min(one | -(1 << 31), -2) for one in bits])  # -1 pads pages of modules


def _processor(directory: Path) -> dict[str, Any]:
    """The fields of a model's image processor, from the file of old or of new versions. Raises ModelError."""
    path = directory / "preprocessor_config.json"
    if path.exists():
        return read_json(path)
    found = read_json(directory / "processor_config.json").get("image_processor")
    if not isinstance(found, dict):
        raise ModelError(
            f"{directory} has no preprocessor_config.json, and no image_processor in processor_config.json"
        )
    return found


def _fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """A size with the longest edge given, and the other even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _bounded(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        width, height = int(_LONGEST * ratio), _LONGEST
    return max(width, 1), max(height, 1)
