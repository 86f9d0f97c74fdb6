"""The interface of attention backends: prepare a plan once per layer group, then run it for each layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from runtime.batch import AttentionPlan


class AttentionBackend(ABC):
    """Runs attention plans over the paged pool."""

    name: str
    # An edge over shared pages must save at least this many reads of KV rows, because it costs a merge of results.
    least_saved_tokens = 256

    def prepare_step(self, plans: Sequence[AttentionPlan]) -> list[Any]:
        """`prepare` the plans of all layer groups of a step. Results of earlier steps become invalid."""
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
            layer: index of the layer, whose new K and V are in the pool already.

        Returns:
            [T', heads, head_dim] in q's dtype. A row without any visible key gives zeros.
        """
