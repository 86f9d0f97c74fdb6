"""Eviction: an order of the unreferenced leaves, and the policies that make one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal, get_args

from radix.node import Node

PolicyName = Literal["lru", "s3fifo", "gdsf"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

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


class Policy(ABC):
    """An eviction policy.

    The tree reports uses, leaves that become evictable, cuts, and nodes that leave; the policy names the victims.
    Only the deepest node of a used path is reported; a parent takes over from its children when they leave.
    """

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or Order()

    @abstractmethod
    def key(self, node: Node) -> float:
        """The node's place in the order; it may only change when the node is used."""

    def used(self, node: Node, tick: int) -> None:  # noqa: B027 - most policies need only some of these
        """A path that ends in `node` was used or inserted at logical time `tick`, one a use.

        `node.hits` counts the uses after the insertion.
        """

    def enter(self, node: Node) -> None:
        """A node is an unreferenced leaf now, or was used while it was one."""
        self.order.push(self.key(node), node)

    def pop(self) -> Node | None:
        """The next victim, out of the order; None if there is none."""
        return self.order.pop()

    def split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """A run was cut in two; `upper` is new, with the run's hits and times, and with no `heat` or `frequency`."""

    def absorb(self, parent: Node, child: Node) -> None:
        """A child leaves; uses of it were uses of its parent, too."""
        parent.last_use = max(parent.last_use, child.last_use)
        parent.used_s = max(parent.used_s, child.used_s)

    def evicted(self, node: Node) -> None:  # noqa: B027
        """A node has left the tree."""


class LRU(Policy):
    def key(self, node: Node) -> float:
        return node.last_use


class S3FIFO(Policy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main one, and a memory of who just left."""

    def __init__(self, capacity: int, small: float = 0.1):
        super().__init__()
        self._small_limit = max(int(capacity * small), 1)
        self._ghost_limit = capacity
        self._main = Order()
        self._small: dict[Node, int] = {}
        self._small_pages = 0
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._last = 0

    def used(self, node: Node, tick: int) -> None:
        """A newcomer starts in the small queue, unless it left a short while ago; later uses are only counted."""
        self._last = max(self._last, tick)
        if node.heat == 0.0:
            node.heat = float(tick)
            if _fingerprint(node) not in self._ghost:
                self._small[node] = len(node.pages)
                self._small_pages += len(node.pages)
        else:
            node.frequency = min(node.frequency + 1, 3)

    def key(self, node: Node) -> float:
        """Time of entry into its queue."""
        return node.heat

    def enter(self, node: Node) -> None:
        (self.order if node in self._small else self._main).push(self.key(node), node)

    def pop(self) -> Node | None:
        """From the small queue while it is over its share; used nodes move on or get another round."""
        while True:
            from_small = self._small_pages > self._small_limit
            node = self.order.pop() if from_small else self._main.pop()
            if node is None:
                node = self._main.pop() if from_small else self.order.pop()
            if node is None or not node.frequency:
                return node
            if node in self._small:
                self._leave_small(node)
                node.frequency = 0
            else:
                node.frequency -= 1
            # Behind everything that has entered so far; ties go by the order of entry.
            node.heat = float(self._last)
            self.enter(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Both parts stay in the run's queue."""
        upper.heat, upper.frequency = lower.heat, lower.frequency
        _divide(self._small, upper, lower)

    def absorb(self, parent: Node, child: Node) -> None:
        """A parent was used as often as its child."""
        super().absorb(parent, child)
        parent.frequency = max(parent.frequency, child.frequency)

    def evicted(self, node: Node) -> None:
        """Remember a newcomer that left unused."""
        if node in self._small:
            self._leave_small(node)
            self._ghost[_fingerprint(node)] = None
            while len(self._ghost) > self._ghost_limit:
                self._ghost.popitem(last=False)

    def _leave_small(self, node: Node) -> None:
        self._small_pages -= self._small.pop(node)


def _divide(pages_of: dict[Node, int], upper: Node, lower: Node) -> None:
    """Share the pages booked for a run between its two parts."""
    if (pages := pages_of.get(lower)) is not None:
        pages_of[lower] = len(lower.pages)
        pages_of[upper] = pages - pages_of[lower]


def _fingerprint(node: Node) -> int:
    """Of the first block alone: it stays when a run is trimmed, or cut behind it."""
    return hash((node.namespace, node.key[: len(node.key) // len(node.pages)]))


class GDSF(Policy):
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

    def evicted(self, node: Node) -> None:
        """Nothing newer may be worth less than what just left."""
        self._clock = max(self._clock, node.heat)


# A new policy is a class above, its name in PolicyName and a line here, which gets the pool's pages.
_MAKERS: dict[PolicyName, Callable[[int], Policy]] = {
    "lru": lambda _: LRU(),
    "s3fifo": S3FIFO,
    "gdsf": lambda _: GDSF(),
}


def make_policy(name: PolicyName, capacity: int) -> Policy:
    """A policy by its name, for a pool of `capacity` pages."""
    return _MAKERS[name](capacity)
