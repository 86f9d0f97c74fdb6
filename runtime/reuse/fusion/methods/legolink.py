"""LegoLink-k (EPIC, Hu et al. 2024): the first rows of each chunk, which draw attention as the prompt's first do."""

from __future__ import annotations

import math

import numpy as np

from runtime.reuse.fusion.looks import Look
from runtime.reuse.fusion.methods.method import Method


class LegoLink(Method):
    """The first `asked.k` rows of each chunk, or with a ratio this share of it. One that begins the prompt has none."""

    name = "legolink"

    def choose(self, look: Look | None) -> np.ndarray:
        layout, asked = self.layout, self.layout.asked
        chosen = np.zeros(len(layout.prompt), dtype=bool)
        for place in layout.places:
            if not place.is_document or not place.start:
                continue
            k = asked.k if asked.ratio is None else math.ceil(asked.ratio * place.entry.length)
            if asked.granularity == "page":
                k = -(-k // layout.page_size) * layout.page_size
            chosen[place.start : place.start + min(k, place.entry.length)] = True
        return layout.candidates[chosen[layout.candidates]]
