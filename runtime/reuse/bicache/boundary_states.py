"""Hidden states with which cached prefixes enter the last reused layer."""

from __future__ import annotations

from collections import OrderedDict

import torch

from radix import Namespace


class BoundaryStore:
    """An LRU store of boundary states by encoding, number of rows and depth.

    They depend on these alone, so no entry grows stale. A lost one is computed again at the next refresh.

    Args:
        max_bytes: bound on all entries together; 0 keeps none.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[tuple[Namespace | None, int, int], torch.Tensor] = OrderedDict()

    def get(self, encoding: Namespace | None, rows: int, depth: int) -> torch.Tensor | None:
        """Float32 [rows, hidden], or None."""
        states = self._entries.get((encoding, rows, depth))
        if states is not None:
            self._entries.move_to_end((encoding, rows, depth))
        return states

    def put(self, encoding: Namespace | None, depth: int, states: torch.Tensor) -> None:
        """Keep states, unless they alone exceed the bound."""
        key = (encoding, len(states), depth)
        if key in self._entries or states.nbytes > self.max_bytes:
            return
        self._entries[key] = states
        self.num_bytes += states.nbytes
        while self.num_bytes > self.max_bytes:
            _, gone = self._entries.popitem(last=False)
            self.num_bytes -= gone.nbytes

    def discard(self, encoding: Namespace | None) -> None:
        """Drop the states of an encoding for all depths."""
        for key in [key for key in self._entries if key[0] == encoding]:
            self.num_bytes -= self._entries.pop(key).nbytes

    def clear(self) -> None:
        self._entries.clear()
        self.num_bytes = 0
