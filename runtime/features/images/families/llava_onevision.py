"""LLaVA-OneVision: a tile with the whole image, and one that fits a grid of crops, with a token behind each line.

The number of images in a prompt changes none of them, so that prefixes are shared: each is cut, as transformers does
for images that are not in lists by prompt.
"""

from __future__ import annotations

import math
from typing import Any

from runtime.errors import ModelError
from runtime.features.images.rules import BICUBIC, CLIP, Rules, TowerCode
from runtime.models.config_json import positive_size

TOWERS = {
    "LlavaOnevisionForConditionalGeneration": TowerCode(
        "llava_onevision",
        "",
        "LlavaOnevisionMultiModalProjector",
        ("vision_tower.", "multi_modal_projector.", "image_"),
        newline=True,
    )
}


class CropRules(Rules, frozen=True, tag="llava_onevision"):
    """See above. The longest edge is that of a crop.

    Attributes:
        grids: widths and heights of grids.
        most: number of crops whose rows are shown one by one; those of larger grids are interpolated.
    """

    grids: tuple[tuple[int, int], ...]
    most: int

    def tiles(self, image: Any) -> list[tuple[Any, tuple[int, ...]]]:
        edge, (width, height) = self.longest, self._grid(*image.size)
        wide, high = width / image.width, height / image.height
        if wide < high:
            size = width, min(math.ceil(image.height * wide), height)
        else:
            size = min(math.ceil(image.width * high), width), height
        left, top = (width - size[0]) // 2, (height - size[1]) // 2
        padded = image.resize(size, self.resample).crop((-left, -top, width - left, height - top))
        whole = image.resize((edge, edge), self.resample)
        return [(whole, (edge, edge)), (padded, (width, height, *self._kept(*image.size)))]

    def rows(self, width: int, height: int, columns: int = -1, lines: int = -1) -> int:
        """`columns`, `lines`: of rows in a grid, without those that show padding alone."""
        if columns < 0:
            return super().rows(width, height)
        columns, lines = self.shown(columns, lines)
        return (columns + 1) * lines

    def shown(self, columns: int, lines: int) -> tuple[int, int]:
        """Columns and lines of a grid after its interpolation."""
        ratio = math.sqrt(lines * columns / (self.most * (self.longest // self.row) ** 2))
        return (int(columns // ratio), int(lines // ratio)) if ratio > 1.1 else (columns, lines)

    def text(self, width: int, height: int) -> str:
        whole = self.rows(self.longest, self.longest)
        return self.image * (whole + self.rows(0, 0, *self._kept(width, height)))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """The grid of which an image uses most pixels, and leaves fewest unused."""

        def rank(grid: tuple[int, int]) -> tuple[int, int]:
            scale = min(grid[0] / width, grid[1] / height)
            used = min(int(width * scale) * int(height * scale), width * height)
            return used, used - grid[0] * grid[1]

        return max(self.grids, key=rank)

    def _kept(self, width: int, height: int) -> tuple[int, int]:
        """Columns and lines of an image's grid that show more than padding."""
        columns, lines = (length // self.longest * (self.longest // self.row) for length in self._grid(width, height))
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        return columns, lines


RULES = CropRules


def read(config: dict[str, Any], found: dict[str, Any]) -> CropRules:
    if (strategy := config.get("vision_feature_select_strategy", "full")) != "full":
        raise ModelError(f"the model has vision_feature_select_strategy {strategy!r}, which is not supported")
    edge = found["size"]["height"]
    grids = found.get("image_grid_pinpoints") or config["image_grid_pinpoints"]
    return CropRules.of(
        found,
        BICUBIC,
        CLIP,
        longest=edge,
        image="<image>",
        row=positive_size(config["vision_config"], "patch_size", 14),
        grids=tuple((width, height) for height, width in grids),
        most=int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")),
    )
