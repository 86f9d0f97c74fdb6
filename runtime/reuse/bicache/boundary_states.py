"""Keeps the hidden states with which cached prefixes enter the last reused layer."""

from __future__ import annotations

from collections import OrderedDict

import torch

from radix import Namespace


class BoundaryStore:
    """Boundary states by encoding, rows and depth, the least recently used first to go.

    They depend on these alone, so an entry never grows stale. One that is gone is computed again
    at the next refresh.

    Args:
        max_bytes: what all entries may hold together; 0 keeps none.
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
        """Keep states, if there is room for them at all."""
        key = (encoding, len(states), depth)
        if key in self._entries or states.nbytes > self.max_bytes:
            return
        self._entries[key] = states
        self.num_bytes += states.nbytes
        while self.num_bytes > self.max_bytes:
            _, gone = self._entries.popitem(last=False)
            self.num_bytes -= gone.nbytes

    def discard(self, encoding: Namespace | None) -> None:
        """Drop the states of an encoding, whatever the depth."""
        for key in [key for key in self._entries if key[0] == encoding]:
            self.num_bytes -= self._entries.pop(key).nbytes

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.num_bytes = 0
