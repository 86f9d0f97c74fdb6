"""Eviction: the policy interface, a victim heap, and LRU, which uses it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from radix.node import Node

_serials = count(1)


class Order:
    """A heap of unreferenced leaves with lazy deletion; a push costs O(log n), amortised.

    An entry is stale if its node is no longer an unreferenced leaf, or was pushed again. `pop` skips stale entries.

    Args:
        attribute: the attribute of a node that holds the serial number of its latest entry.
    """

    def __init__(self, attribute: Literal["queued", "tenant_queued"] = "queued") -> None:
        self._attribute = attribute
        self._heap: list[tuple[float, int, Node]] = []
        self._compact_at = 64

    def push(self, key: float, node: Node) -> None:
        """Add a node or replace its entry. The smallest key is popped first; equal keys in the order of pushes."""
        serial = next(_serials)
        setattr(node, self._attribute, serial)
        heappush(self._heap, (key, serial, node))
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapify(self._heap)
            self._compact_at = 4 * len(self._heap) + 64

    def pop(self) -> Node | None:
        """Remove and return the node with the smallest key; None if the heap is empty."""
        while self._heap:
            entry = heappop(self._heap)
            if self._is_valid(entry):
                return entry[2]
        return None

    def _is_valid(self, entry: tuple[float, int, Node]) -> bool:
        return getattr(entry[2], self._attribute) == entry[1] and entry[2].is_free_leaf


# A node, and the largest number of pages to evict from its end.
Victim = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class Outlook:
    """A policy's expectation of a node.

    Attributes:
        kind: the class in which the policy puts the node, in words.
        age: number of uses of the whole tree since the node's last use.
        promise: expected hits per page and per use of the tree, if the node is kept for as long as that pays.
    """

    kind: str
    age: int
    promise: float


class Policy(ABC):
    """An eviction policy.

    The tree reports uses, leaves that become evictable, splits and leaving pages; the policy names victims. A use of a
    path is reported for its deepest node only. When a node leaves the tree, `absorb` passes its uses to its parent.
    """

    def used(self, node: Node, tick: int) -> None:  # noqa: B027 - most policies need only some of these
        """The path that ends in `node` was used or inserted. `tick` is the tree's logical time.

        `node.hits` counts the uses after the insertion.
        """

    @abstractmethod
    def enter(self, node: Node) -> None:
        """A node has become an unreferenced leaf, or is one and was used again."""

    @abstractmethod
    def pop(self) -> Victim | None:
        """Remove and return the next victim; None if there is none."""

    def split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """A node was split: `lower` is the old node, `upper` a new one with the same hits and times and no record."""

    def leaving(self, node: Node, kept_pages: int) -> None:  # noqa: B027
        """See `Watcher.leaving`."""

    def absorb(self, parent: Node, child: Node) -> None:
        """A child has left the tree; its last use counts as one of its parent."""
        parent.last_use = max(parent.last_use, child.last_use)
        parent.used_s = max(parent.used_s, child.used_s)

    def outlook(self, node: Node) -> Outlook | None:
        """What the policy expects of a node, for operators; None if it has no expectation."""
        return None


class LRU(Policy):
    """Least recently used. It evicts whole leaves."""

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or Order()

    def enter(self, node: Node) -> None:
        self.order.push(node.last_use, node)

    def pop(self) -> Victim | None:
        node = self.order.pop()
        return None if node is None else (node, len(node.pages))
