"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: the whole image is one tile, and its rows have the positions of a grid."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from runtime.features.images.rules import BICUBIC, CLIP, Rules, TowerCode, up
from runtime.models.config_json import architecture_of, positive_size

TOWERS = {
    "Qwen2_5_VLForConditionalGeneration": TowerCode(
        "qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "", ("visual.", "")
    ),
    "Qwen3VLForConditionalGeneration": TowerCode("qwen3_vl", "Qwen3VLVisionModel", "", ("model.visual.", "")),
    "Qwen3_5ForConditionalGeneration": TowerCode("qwen3_5", "Qwen3_5VisionModel", "", ("model.visual.", "")),
}


class GridRules(Rules, frozen=True, tag="qwen_vl"):
    """See above.

    Attributes:
        least, most: numbers of pixels.
        deep: layers of the tower behind which it makes further states; of Qwen3-VL.
    """

    has_axes: ClassVar[bool] = True
    least: int
    most: int
    deep: tuple[int, ...] = ()

    @property
    def added(self) -> int:
        return len(self.deep)

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        unit = self.row
        fitted = round(width / unit) * unit, round(height / unit) * unit
        if fitted[0] * fitted[1] > self.most:
            ratio = math.sqrt((height * width) / self.most)
            return [(_down(width / ratio, unit), _down(height / ratio, unit))]
        if fitted[0] * fitted[1] < self.least:
            ratio = math.sqrt(self.least / (height * width))
            return [(up(width * ratio, unit), up(height * ratio, unit))]
        return [fitted]

    def text(self, width: int, height: int) -> str:
        (size,) = self.sizes(width, height)
        return self.image * self.rows(*size)


RULES = GridRules


def read(config: dict[str, Any], found: dict[str, Any]) -> GridRules:
    size = found.get("size") or {}
    is_deep = architecture_of(config) == "Qwen3VLForConditionalGeneration"
    merge = positive_size(config["vision_config"], "spatial_merge_size", 2)
    return GridRules.of(
        found,
        BICUBIC,
        CLIP,
        longest=0,
        image="<|image_pad|>",
        row=merge * positive_size(config["vision_config"], "patch_size", 14),
        least=found.get("min_pixels") or size.get("shortest_edge", 56 * 56),
        most=found.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280),
        deep=tuple(config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24))) if is_deep else (),
    )


def _down(length: float, unit: int) -> int:
    return max(unit, math.floor(length / unit) * unit)
