"""A victim order: which unreferenced leaf comes first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from radix.node import Node

_serials = count(1)


class Order:
    """A heap with lazy deletion: every entry is pushed once and popped once, so O(log n) each, amortised.

    An entry holds while its node is an unreferenced leaf and has not been entered anew since, into this order or
    another one of the same `book`.

    Args:
        book: the attribute in which a node keeps the serial of its one entry that holds.
    """

    def __init__(self, book: Literal["queued", "tenant_queued"] = "queued") -> None:
        self._book = book
        self._heap: list[tuple[float, int, Node]] = []
        self._compact_at = 64

    def push(self, key: float, node: Node) -> None:
        """Enter a node; the smallest key is popped first, ties in the order of entry."""
        serial = next(_serials)
        setattr(node, self._book, serial)
        heappush(self._heap, (key, serial, node))
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapify(self._heap)
            self._compact_at = 4 * len(self._heap) + 64

    def first(self) -> tuple[float, Node] | None:
        """The smallest entry that holds, left in place."""
        while self._heap:
            if self._holds(self._heap[0]):
                return self._heap[0][0], self._heap[0][2]
            heappop(self._heap)
        return None

    def pop(self) -> Node | None:
        """Take the node of the smallest entry that holds."""
        found = self.first()
        if found is None:
            return None
        heappop(self._heap)
        return found[1]

    def _holds(self, entry: tuple[float, int, Node]) -> bool:
        return getattr(entry[2], self._book) == entry[1] and entry[2].is_free_leaf
