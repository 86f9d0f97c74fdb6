"""Hidden states with which cached prefixes enter the last reused layer."""

from __future__ import annotations

import torch
from cachetools import LRUCache

from radix import Namespace


class BoundaryStore(LRUCache[tuple[Namespace | None, int, int], torch.Tensor]):
    """An LRU store of boundary states, float32 [rows, hidden], by encoding, number of rows and depth.

    They depend on these alone, so no entry grows stale. A lost entry is computed again at the next refresh.
    """

    def __init__(self, max_bytes: int):
        """`max_bytes`: bound on all entries together; 0 keeps none."""
        super().__init__(max_bytes, getsizeof=lambda states: states.nbytes)

    def put(self, encoding: Namespace | None, depth: int, states: torch.Tensor) -> None:
        """Keep states, unless they alone exceed the bound."""
        key = (encoding, len(states), depth)
        if key not in self and states.nbytes <= self.maxsize:
            self[key] = states

    def discard(self, encoding: Namespace | None) -> None:
        """Drop the states of an encoding for all depths."""
        for key in [key for key in self if key[0] == encoding]:
            del self[key]
