"""CacheBlend (Yao et al. 2024): the rows whose values in layer 1 differ most from those that were stored."""

from __future__ import annotations

import torch

from runtime.reuse.fusion.looks import DenseLook, Look
from runtime.reuse.fusion.methods.method import Scored


class CacheBlend(Scored):
    """The score of a row is the squared distance of its values."""

    name = "cacheblend"
    look = DenseLook

    def scores(self, look: Look | None) -> torch.Tensor:
        assert isinstance(look, DenseLook)
        candidates = self.layout.candidates
        return (look.true_values(candidates) - look.stored_values(candidates)).square().sum((1, 2))
