"""How a model sees images: into which tiles it cuts them, and what stands for them in a prompt. No torch, no Pillow."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from runtime.errors import ModelError
from runtime.models.config_json import architecture_of, positive_size, read_json
from runtime.models.seeing import SEEING

# Longest edge of an image after its first resizing, whatever the model's files say.
_LONGEST = 4096
# Most rows that see each other: a step computes them together, also in layers with a window (`runtime.kv.near`).
MOST_MUTUAL = 256
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}


class Pixels(msgspec.Struct, frozen=True, tag=True):
    """What all rules say of pixels, and of the rows that show them. Lengths are in pixels.

    Attributes:
        longest: longest edge of the image as a whole, or before it is cut.
        resample: Pillow's number of the filter.
        rescale, mean, std: a pixel's value is (byte x rescale - mean) / std, by channel.
        image: text of the token of a row.
        row: edge of the square of a tile that a row shows.
        mutual: whether the rows of a tile see each other.
        has_axes: whether the positions of rows have three axes.
    """

    mutual: ClassVar[bool] = False
    has_axes: ClassVar[bool] = False

    longest: int
    resample: int
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image: str
    row: int

    @property
    def written(self) -> str:
        """The text that chat templates write for an image."""
        return self.image

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """The sizes (width, height) to which an image is resized, one after the other."""
        raise NotImplementedError

    def boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        """The boxes (left, top, right, bottom) of tiles in the resized image, before the tile with all of it.

        That tile has the size of a box; without boxes, it is the resized image.
        """
        return []

    def rows(self, width: int, height: int) -> int:
        """The number of rows that show a tile of a size."""
        return (width // self.row) * (height // self.row)

    def text(self, width: int, height: int) -> str:
        """The text that stands for an image in a prompt, which has `self.image` for each row of each tile."""
        raise NotImplementedError


class SquareRules(Pixels, frozen=True, tag=True):
    """The rules of Idefics 3 and SmolVLM: square tiles, and one with the whole image.

    Attributes:
        tile: edge of a tile.
        splits: whether larger images are cut; if not, the whole image is one tile.
        edge, whole: texts of the tokens around tiles, and of the tile with the whole image.
    """

    tile: int
    splits: bool
    edge: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        first = _bounded(*_fitted(width, height, self.longest))
        if not self.splits:
            return [first, (self.tile, self.tile)]
        width, height = first
        ratio = width / height
        if width >= height:
            width = _up(width, self.tile)
            height = _up(int(width / ratio), self.tile)
        else:
            height = _up(height, self.tile)
            width = _up(int(height * ratio), self.tile)
        return [first, (width, height)]

    def boxes(self, width: int, height: int) -> list[tuple[int, int, int, int]]:
        rows, columns, edge = *self._grid(width, height), self.tile
        return [
            (j * edge, i * edge, (j + 1) * edge, (i + 1) * edge)
            for i in range(rows)
            for j in range(columns)
            if rows * columns > 1
        ]

    def text(self, width: int, height: int) -> str:
        rows, columns = self._grid(width, height)
        row, cut = self.image * self.rows(self.tile, self.tile), ""
        for i in range(1, rows + 1 if rows * columns > 1 else 1):
            cut += "".join(f"{self.edge}<row_{i}_col_{j}>{row}" for j in range(1, columns + 1)) + "\n"
        return f"{cut}{cut and chr(10)}{self.edge}{self.whole}{row}{self.edge}"

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        width, height = self.sizes(width, height)[-1]
        return height // self.tile, width // self.tile


class LineRules(Pixels, frozen=True, tag=True):
    """The rules of Mistral 3: the whole image is one tile, with a token behind each line of rows.

    Attributes:
        line, end: texts of the tokens behind a line, and behind the last one.
    """

    line: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        return [(_up(max(width, 1), self.row), _up(max(height, 1), self.row))]

    def text(self, width: int, height: int) -> str:
        (size,) = self.sizes(width, height)
        lines = [self.image * (size[0] // self.row)] * (size[1] // self.row)
        return self.line.join(lines) + self.end


class WholeRules(Pixels, frozen=True, tag=True):
    """The rules of Gemma 3: the image as a whole is a square tile, whose rows see each other."""

    mutual: ClassVar[bool] = True
    start: str = "<start_of_image>"
    end: str = "<end_of_image>"

    @property
    def written(self) -> str:
        return self.start

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        return [(self.longest, self.longest)]

    def text(self, width: int, height: int) -> str:
        return f"\n\n{self.start}{self.image * self.rows(self.longest, self.longest)}{self.end}\n\n"


class GridRules(Pixels, frozen=True, tag=True):
    """The rules of Qwen2.5-VL and Qwen3.5: the whole image is one tile, and its rows have the positions of a grid.

    Attributes:
        least, most: numbers of pixels.
    """

    has_axes: ClassVar[bool] = True
    least: int
    most: int

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        unit = self.row
        fitted = round(width / unit) * unit, round(height / unit) * unit
        if fitted[0] * fitted[1] > self.most:
            ratio = math.sqrt((height * width) / self.most)
            return [(_down(width / ratio, unit), _down(height / ratio, unit))]
        if fitted[0] * fitted[1] < self.least:
            ratio = math.sqrt(self.least / (height * width))
            return [(_up(width * ratio, unit), _up(height * ratio, unit))]
        return [fitted]

    def text(self, width: int, height: int) -> str:
        (size,) = self.sizes(width, height)
        return self.image * self.rows(*size)


Rules = SquareRules | LineRules | WholeRules | GridRules


def load_rules(directory: Path) -> Rules | None:
    """The rules of a model; None: it does not see. Raises ModelError."""
    config = read_json(directory / "config.json")
    if (architecture := architecture_of(config)) not in SEEING:
        return None
    if architecture == "Qwen3_5ForConditionalGeneration" and not _has_processor(directory):
        return None  # its decoder alone
    found = _processor(directory)
    if wrong := [name for name, value in _FIXED.items() if found.get(name, value) is not value]:
        raise ModelError(f"the model's image processor has {wrong[0]} {found[wrong[0]]!r}, which is not supported")
    try:
        return _READERS.get(architecture, _of_squares)(config, found)
    except (KeyError, TypeError) as error:
        raise ModelError(f"the image processor of the model in {directory} cannot be read: {error!r}") from None


def _of_squares(config: dict[str, Any], found: dict[str, Any]) -> SquareRules:
    patch = positive_size(config["vision_config"], "patch_size", 32)
    return SquareRules(
        longest=found["size"]["longest_edge"],
        resample=found.get("resample", 1),
        rescale=found.get("rescale_factor", 1 / 255),
        mean=tuple(found.get("image_mean", (0.5, 0.5, 0.5))),
        std=tuple(found.get("image_std", (0.5, 0.5, 0.5))),
        image="<image>",
        tile=found["max_image_size"]["longest_edge"],
        splits=found.get("do_image_splitting", True),
        row=patch * positive_size(config, "scale_factor", 2),
    )


def _of_lines(config: dict[str, Any], found: dict[str, Any]) -> LineRules:
    patch = positive_size(config["vision_config"], "patch_size", 16)
    return LineRules(
        longest=found["size"]["longest_edge"],
        resample=found.get("resample", 3),
        rescale=found.get("rescale_factor", 1 / 255),
        mean=tuple(found["image_mean"]),
        std=tuple(found["image_std"]),
        image="[IMG]",
        row=patch * positive_size(config, "spatial_merge_size", 2),
    )


def _of_wholes(config: dict[str, Any], found: dict[str, Any]) -> WholeRules:
    edge, rows = found["size"]["height"], positive_size(config, "mm_tokens_per_image", 256)
    if found.get("do_pan_and_scan"):
        raise ModelError("the model's image processor has do_pan_and_scan, which is not supported")
    if rows > MOST_MUTUAL or edge != found["size"]["width"] or edge % math.isqrt(rows):
        raise ModelError(
            f"the model has {rows} rows for an image of {found['size']}; supported are squares of at most {MOST_MUTUAL}"
        )
    return WholeRules(
        longest=edge,
        resample=found.get("resample", 2),
        rescale=found.get("rescale_factor", 1 / 255),
        mean=tuple(found.get("image_mean", (0.5, 0.5, 0.5))),
        std=tuple(found.get("image_std", (0.5, 0.5, 0.5))),
        image="<image_soft_token>",
        row=edge // math.isqrt(rows),
    )


def _of_grids(config: dict[str, Any], found: dict[str, Any]) -> GridRules:
    size = found.get("size") or {}
    merge = positive_size(config["vision_config"], "spatial_merge_size", 2)
    return GridRules(
        longest=0,
        resample=found.get("resample", 3),
        rescale=found.get("rescale_factor", 1 / 255),
        mean=tuple(found.get("image_mean", _CLIP_MEAN)),
        std=tuple(found.get("image_std", _CLIP_STD)),
        image="<|image_pad|>",
        row=merge * positive_size(config["vision_config"], "patch_size", 14),
        least=found.get("min_pixels") or size.get("shortest_edge", 56 * 56),
        most=found.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
    )


_READERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Rules]] = {
    "Mistral3ForConditionalGeneration": _of_lines,
    "Gemma3ForConditionalGeneration": _of_wholes,
    "Qwen2_5_VLForConditionalGeneration": _of_grids,
    "Qwen3_5ForConditionalGeneration": _of_grids,
}


def _up(length: float, unit: int) -> int:
    return math.ceil(length / unit) * unit


def _down(length: float, unit: int) -> int:
    return max(unit, math.floor(length / unit) * unit)


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
    return array("i", [min(one | -(1 << 31), -2) for one in bits])  # -1 pads pages of modules


def _has_processor(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("preprocessor_config.json", "processor_config.json"))


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
