"""The interface of attention backends: a plan is prepared once per layer group, then run by each of its layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from runtime.batch import AttentionPlan


class AttentionBackend(ABC):
    """Runs attention plans over the paged pool."""

    name: str
    # Reads of KV rows that an edge over shared pages must save to pay for the merge of its partial results.
    least_saved_tokens = 256

    def prepare_step(self, plans: Sequence[AttentionPlan]) -> list[Any]:
        """`prepare` the plans of all layer groups of a step; results for earlier steps become invalid."""
        return [self.prepare(plan) for plan in plans]

    @abstractmethod
    def prepare(self, plan: AttentionPlan) -> Any:
        """Index arrays, wrapper plans or kernel arguments for `run`."""

    @abstractmethod
    def run(self, prepared: Any, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of one layer.

        Args:
            prepared: result of `prepare`.
            q: [T', heads, head_dim], rotated for its own positions.
            layer: index of the layer; its new K and V are in the pool already.

        Returns:
            [T', heads, head_dim] in q's dtype. A row without any visible key gives zeros.
        """
