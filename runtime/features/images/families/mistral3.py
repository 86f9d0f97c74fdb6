"""Mistral 3: the whole image is one tile, with a token behind each line of rows."""

from __future__ import annotations

import math
from typing import Any

from runtime.features.images.rules import BICUBIC, CLIP, Rules, TowerCode, up
from runtime.models.config_json import positive_size

TOWERS = {
    "Mistral3ForConditionalGeneration": TowerCode(
        "mistral3", "", "Mistral3MultiModalProjector", ("vision_tower.", "multi_modal_projector."), sized=True
    )
}


class LineRules(Rules, frozen=True, tag="mistral3"):
    """See above."""

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        return [(up(max(width, 1), self.row), up(max(height, 1), self.row))]

    def text(self, width: int, height: int) -> str:
        (size,) = self.sizes(width, height)
        lines = [self.image * (size[0] // self.row)] * (size[1] // self.row)
        return "[IMG_BREAK]".join(lines) + "[IMG_END]"


RULES = LineRules


def read(config: dict[str, Any], found: dict[str, Any]) -> LineRules:
    patch = positive_size(config["vision_config"], "patch_size", 16)
    return LineRules.of(
        found,
        BICUBIC,
        CLIP,
        longest=found["size"]["longest_edge"],
        image="[IMG]",
        row=patch * positive_size(config, "spatial_merge_size", 2),
    )
