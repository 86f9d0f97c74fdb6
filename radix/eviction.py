"""Eviction: the policy interface, a victim heap, and two policies that use it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from radix.node import Node

_serials = count(1)


class Order:
    """A heap of unreferenced leaves with lazy deletion; O(log n) an entry, amortised.

    An entry is valid while its node is an unreferenced leaf and has no later entry in an order of the same `book`.

    Args:
        book: the node's attribute for the serial of its valid entry.
    """

    def __init__(self, book: Literal["queued", "tenant_queued"] = "queued") -> None:
        self._book = book
        self._heap: list[tuple[float, int, Node]] = []
        self._compact_at = 64

    def push(self, key: float, node: Node) -> None:
        """Add a node; the smallest key is popped first, ties in the order of entry."""
        serial = next(_serials)
        setattr(node, self._book, serial)
        heappush(self._heap, (key, serial, node))
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapify(self._heap)
            self._compact_at = 4 * len(self._heap) + 64

    def pop(self) -> Node | None:
        """Remove and return the node of the smallest valid entry; None if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            if self._holds(entry):
                return entry[2]
        return None

    def _holds(self, entry: tuple[float, int, Node]) -> bool:
        return getattr(entry[2], self._book) == entry[1] and entry[2].is_free_leaf


# A node, and the most pages of its end to evict.
Victim = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class Outlook:
    """A policy's expectation of a node.

    Attributes:
        kind: the policy's class of the node, in words.
        age: uses of the tree since the node's last use.
        promise: expected hits a page and use, if the node is kept as long as that is worthwhile.
    """

    kind: str
    age: int
    promise: float


class Policy(ABC):
    """An eviction policy.

    The tree reports uses, leaves that become evictable, splits and leaving pages; the policy names victims. Of a used
    path only the deepest node is reported; a parent takes over from its children when they leave.
    """

    def used(self, node: Node, tick: int) -> None:  # noqa: B027 - most policies need only some of these
        """A path that ends in `node` was used or inserted at logical time `tick`, one a use.

        `node.hits` counts the uses after the insertion.
        """

    @abstractmethod
    def enter(self, node: Node) -> None:
        """A node has become an unreferenced leaf, or was used as one."""

    @abstractmethod
    def pop(self) -> Victim | None:
        """Remove and return the next victim; None if there is none."""

    def split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """A run was split; `upper` is new, with the run's hits and times and without a record."""

    def leaving(self, node: Node, kept_pages: int) -> None:  # noqa: B027
        """See `Watcher.leaving`."""

    def absorb(self, parent: Node, child: Node) -> None:
        """A child has left; its uses count for its parent."""
        parent.last_use = max(parent.last_use, child.last_use)
        parent.used_s = max(parent.used_s, child.used_s)

    def outlook(self, node: Node) -> Outlook | None:
        """The expectation of a node, for operators; None: there is none."""
        return None


class _Ordered(Policy):
    """Evicts whole leaves in the order of a key."""

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or Order()

    @abstractmethod
    def key(self, node: Node) -> float:
        """The node's key; it may only change when the node is used."""

    def enter(self, node: Node) -> None:
        self.order.push(self.key(node), node)

    def pop(self) -> Victim | None:
        node = self.order.pop()
        return None if node is None else (node, len(node.pages))


class LRU(_Ordered):
    """Least recently used."""

    def key(self, node: Node) -> float:
        return node.last_use


class GDSF(_Ordered):
    """Greedy-Dual-Size-Frequency: cost x frequency / size, over a clock that rises with every victim."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def used(self, node: Node, tick: int) -> None:
        node.heat = self._clock + (1 + node.hits) * node.cost / max(len(node.pages), 1)

    def key(self, node: Node) -> float:
        return node.heat

    def absorb(self, parent: Node, child: Node) -> None:
        super().absorb(parent, child)
        self.used(parent, parent.last_use)

    def leaving(self, node: Node, kept_pages: int) -> None:
        """Raise the clock: no newer node is worth less than the victim."""
        if not kept_pages:
            self._clock = max(self._clock, node.heat)
