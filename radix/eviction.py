"""Eviction: what a policy is told and asked, an order of the unreferenced leaves, and two policies that make one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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

    def pop(self) -> Node | None:
        """Take the node of the smallest entry that holds; None if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            if self._holds(entry):
                return entry[2]
        return None

    def _holds(self, entry: tuple[float, int, Node]) -> bool:
        return getattr(entry[2], self._book) == entry[1] and entry[2].is_free_leaf


# A node, and how many pages of its end may go at most.
Victim = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class Outlook:
    """A policy's expectation of a node.

    Attributes:
        kind: what it was taken for, in words.
        age: uses of the tree since it was used.
        promise: hits a page and use, if it is kept as long as that is worthwhile.
    """

    kind: str
    age: int
    promise: float


class Policy(ABC):
    """An eviction policy.

    The tree reports uses, leaves that become evictable, cuts, and pages that leave; the policy names the victims.
    Only the deepest node of a used path is reported; a parent takes over from its children when they leave.
    """

    def used(self, node: Node, tick: int) -> None:  # noqa: B027 - most policies need only some of these
        """A path that ends in `node` was used or inserted at logical time `tick`, one a use.

        `node.hits` counts the uses after the insertion.
        """

    @abstractmethod
    def enter(self, node: Node) -> None:
        """A node is an unreferenced leaf now, or was used while it was one."""

    @abstractmethod
    def pop(self) -> Victim | None:
        """The next victim, out of the order; None if there is none."""

    def split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """A run was cut in two; `upper` is new, with the run's hits and times, and without a record."""

    def leaving(self, node: Node, kept_pages: int) -> None:  # noqa: B027
        """The pages of a leaf from `kept_pages` on leave, with 0 the node does; before any change."""

    def absorb(self, parent: Node, child: Node) -> None:
        """A child has left; uses of it were uses of its parent, too."""
        parent.last_use = max(parent.last_use, child.last_use)
        parent.used_s = max(parent.used_s, child.used_s)

    def outlook(self, node: Node) -> Outlook | None:
        """For operators; None: the policy expects nothing in particular."""
        return None


class _Ordered(Policy):
    """Whole leaves, by a key."""

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or Order()

    @abstractmethod
    def key(self, node: Node) -> float:
        """The node's place in the order; it may only change when the node is used."""

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
        """Nothing newer may be worth less than what just left."""
        if not kept_pages:
            self._clock = max(self._clock, node.heat)
