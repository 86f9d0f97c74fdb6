"""Idefics 3 and SmolVLM: square tiles, and one with the whole image."""

from __future__ import annotations

from typing import Any

from runtime.features.images.rules import LANCZOS, Rules, TowerCode, up
from runtime.models.config_json import positive_size

# Longest edge of an image after its first resizing, whatever the model's files say.
_LONGEST = 4096
TOWERS = {
    "Idefics3ForConditionalGeneration": TowerCode("idefics3", "Idefics3VisionTransformer", "Idefics3Connector"),
    "SmolVLMForConditionalGeneration": TowerCode("smolvlm", "SmolVLMVisionTransformer", "SmolVLMConnector"),
}


class SquareRules(Rules, frozen=True, tag="idefics3"):
    """See above.

    Attributes:
        tile: edge of a tile.
        splits: whether larger images are cut; if not, the whole image is one tile.
    """

    tile: int
    splits: bool

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        first = _bounded(*_fitted(width, height, self.longest))
        if not self.splits:
            return [first, (self.tile, self.tile)]
        width, height = first
        ratio = width / height
        if width >= height:
            width = up(width, self.tile)
            height = up(int(width / ratio), self.tile)
        else:
            height = up(height, self.tile)
            width = up(int(height * ratio), self.tile)
        return [first, (width, height)]

    def tiles(self, image: Any) -> list[tuple[Any, tuple[int, ...]]]:
        (rows, columns), edge = self._grid(*image.size), self.tile
        ((image, size),) = super().tiles(image)
        if rows * columns == 1:
            return [(image, size)]
        starts = [(j * edge, i * edge) for i in range(rows) for j in range(columns)]
        cut = [image.crop((left, top, left + edge, top + edge)) for left, top in starts]
        return [(tile, (edge, edge)) for tile in (*cut, image.resize((edge, edge), self.resample))]

    def text(self, width: int, height: int) -> str:
        rows, columns = self._grid(width, height)
        row, edge, cut = self.image * self.rows(self.tile, self.tile), "<fake_token_around_image>", ""
        for i in range(1, rows + 1 if rows * columns > 1 else 1):
            cut += "".join(f"{edge}<row_{i}_col_{j}>{row}" for j in range(1, columns + 1)) + "\n"
        return f"{cut}{cut and chr(10)}{edge}<global-img>{row}{edge}"

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        width, height = self.sizes(width, height)[-1]
        return height // self.tile, width // self.tile


RULES = SquareRules


def read(config: dict[str, Any], found: dict[str, Any]) -> SquareRules:
    patch = positive_size(config["vision_config"], "patch_size", 32)
    return SquareRules.of(
        found,
        LANCZOS,
        longest=found["size"]["longest_edge"],
        image="<image>",
        tile=found["max_image_size"]["longest_edge"],
        splits=found.get("do_image_splitting", True),
        row=patch * positive_size(config, "scale_factor", 2),
    )


def _fitted(width: int, height: int, longest: int, unit: int = 2) -> tuple[int, int]:
    """A size with the longest edge given, and the other a multiple of `unit`."""
    ratio = width / height
    if width >= height:
        width, height = longest, up(int(longest / ratio), unit)
    else:
        width, height = up(int(longest * ratio), unit), longest
    return max(width, 1), max(height, 1)


def _bounded(width: int, height: int) -> tuple[int, int]:
    return _fitted(width, height, _LONGEST, 1) if max(width, height) > _LONGEST else (width, height)
