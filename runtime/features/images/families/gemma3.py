"""Gemma 3: the image as a whole is a square tile, whose rows see each other."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from runtime.errors import ModelError
from runtime.features.images.rules import BILINEAR, Rules, TowerCode
from runtime.models.config_json import positive_size

# Most rows that see each other: a step computes them together, also in layers with a window (`runtime.kv.near`).
MOST_MUTUAL = 256
TOWERS = {
    "Gemma3ForConditionalGeneration": TowerCode(
        "gemma3", "", "Gemma3MultiModalProjector", ("vision_tower.", "multi_modal_projector.")
    )
}


class WholeRules(Rules, frozen=True, tag="gemma3"):
    """See above."""

    mutual: ClassVar[bool] = True

    @property
    def written(self) -> str:
        return "<start_of_image>"

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        return [(self.longest, self.longest)]

    def text(self, width: int, height: int) -> str:
        return f"\n\n{self.written}{self.image * self.rows(self.longest, self.longest)}<end_of_image>\n\n"


RULES = WholeRules


def read(config: dict[str, Any], found: dict[str, Any]) -> WholeRules:
    edge, rows = found["size"]["height"], positive_size(config, "mm_tokens_per_image", 256)
    if found.get("do_pan_and_scan"):
        raise ModelError("the model's image processor has do_pan_and_scan, which is not supported")
    if rows > MOST_MUTUAL or edge != found["size"]["width"] or edge % math.isqrt(rows):
        raise ModelError(
            f"the model has {rows} rows for an image of {found['size']}; supported are squares of at most {MOST_MUTUAL}"
        )
    return WholeRules.of(
        found,
        BILINEAR,
        longest=edge,
        image="<image_soft_token>",
        row=edge // math.isqrt(rows),
    )
