"""The attention interface: a plan is prepared once per layer group, then run by each of its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from runtime.batch import AttentionPlan


class AttentionBackend(ABC):
    """Runs attention plans over the paged pool."""

    name: str
    # Rows of shared KV that must be saved for an edge of its own to pay for the merge of its partial results.
    least_saved_tokens = 256

    def prepare_step(self, plans: Sequence[AttentionPlan]) -> list[Any]:
        """`prepare` the plans of all layer groups of a step; what earlier steps prepared is not run any more."""
        return [self.prepare(plan) for plan in plans]

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
