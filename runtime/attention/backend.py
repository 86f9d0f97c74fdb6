"""The attention interface: a plan is prepared once per layer group, then run by each of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from runtime.batch import AttentionPlan


class AttentionBackend(ABC):
    """Runs attention plans over the paged pool."""

    name: str

    @abstractmethod
    def prepare(self, plan: AttentionPlan) -> Any:
        """Turn a plan into whatever `run` needs (index arrays, wrapper plans); called once per layer group."""

    @abstractmethod
    def run(self, prepared: Any, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of one layer.

        Args:
            prepared: what `prepare` returned.
            q: [T', heads, head_dim], rotated for its own positions.
            layer: index of the layer, whose new K and V are in the pool already.

        Returns:
            [T', heads, head_dim] in q's dtype. A row without any visible key gives zeros.
        """
