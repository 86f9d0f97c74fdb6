"""Which unreferenced leaf goes first: eviction policies behind one small interface."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from radix.node import Node
from radix.order import Order


def _divide(pages_of: dict[Node, int], upper: Node, lower: Node) -> None:
    """Share the pages booked for a run between its two parts."""
    if (pages := pages_of.get(lower)) is not None:
        pages_of[lower] = min(pages, len(lower.pages))
        pages_of[upper] = pages - pages_of[lower]


class Policy(ABC):
    """An eviction policy.

    The tree tells it of uses, of leaves that become evictable, and of nodes that are gone; it names the victims.
    `tick` is logical time, one a use.
    """

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or Order()

    @abstractmethod
    def key(self, node: Node) -> float:
        """The node's place in the order; it may only change when the node is used."""

    def used(self, node: Node, tick: int) -> None:  # noqa: B027 - most policies need only some of these
        """A path that ends in `node` was used or inserted; `node.hits` counts the uses after the first."""

    def enter(self, node: Node) -> None:
        """A node is an unreferenced leaf now, or was used while it was one."""
        self.order.push(self.key(node), node)

    def pop(self) -> Node | None:
        """The next victim, out of the order; None if there is none."""
        return self.order.pop()

    def due(self, now: float) -> bool:
        """Whether the next victim should go at `now` (the tree's clock), even if nobody needs the room."""
        return False

    def split(self, upper: Node, lower: Node) -> None:  # noqa: B027
        """A run was cut; `upper` has the record of `lower` already."""

    def absorb(self, parent: Node, child: Node) -> None:
        """A child leaves; uses of it were uses of its parent as well."""
        parent.last_use = max(parent.last_use, child.last_use)
        parent.used_s = max(parent.used_s, child.used_s)
        parent.hits += child.hits

    def evicted(self, node: Node) -> None:  # noqa: B027
        """A node is gone."""


class LRU(Policy):
    """Least recently used."""

    def key(self, node: Node) -> float:
        """Time of the last use."""
        return node.last_use


class LFU(Policy):
    """Least frequently used, where a use counts half as much after every `half_life` uses of the tree.

    Decay needs no sweep: `heat` is log2 of the decayed count, grown by the time that has passed, so that values of
    different ages compare as they stand.
    """

    def __init__(self, half_life: float = 2000.0):
        super().__init__()
        self._half_life = half_life

    def used(self, node: Node, tick: int) -> None:
        """Add one use at the present weight."""
        present = tick / self._half_life
        heat = present if node.heat == 0.0 else max(node.heat, present) + math.log2(1 + 2 ** -abs(node.heat - present))
        node.heat = heat

    def absorb(self, parent: Node, child: Node) -> None:
        """Counts add up."""
        super().absorb(parent, child)
        high, low = max(parent.heat, child.heat), min(parent.heat, child.heat)
        parent.heat = high + math.log2(1 + 2 ** (low - high))

    def key(self, node: Node) -> float:
        """The decayed count."""
        return node.heat


class SLRU(Policy):
    """Segmented LRU: what was used once goes before what was used again, which holds at most a share of the pages."""

    def __init__(self, capacity: int, protected: float = 0.8):
        super().__init__()
        self._limit = int(capacity * protected)
        self._protected: OrderedDict[Node, int] = OrderedDict()
        self._pages = 0

    def used(self, node: Node, tick: int) -> None:
        """A second use protects; what was protected longest ago falls back when the segment is full."""
        if not node.hits:
            return
        self._pages += len(node.pages) - self._protected.pop(node, 0)
        self._protected[node] = len(node.pages)
        while self._pages > self._limit and len(self._protected) > 1:
            oldest, pages = self._protected.popitem(last=False)
            self._pages -= pages
            if oldest.is_free_leaf:
                self.enter(oldest)

    def key(self, node: Node) -> float:
        """Last use, behind everything unprotected if the node is protected."""
        return node.last_use + (1 << 52 if node in self._protected else 0)

    def split(self, upper: Node, lower: Node) -> None:
        """Both parts of a protected run are."""
        _divide(self._protected, upper, lower)

    def absorb(self, parent: Node, child: Node) -> None:
        """A parent is protected as its child was."""
        super().absorb(parent, child)
        if child in self._protected and parent not in self._protected:
            self._protected[parent] = len(parent.pages)
            self._pages += len(parent.pages)

    def evicted(self, node: Node) -> None:
        """Leave the segment."""
        self._pages -= self._protected.pop(node, 0)


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
            if self._fingerprint(node) not in self._ghost:
                self._small[node] = len(node.pages)
                self._small_pages += len(node.pages)
        else:
            node.frequency = min(node.frequency + 1, 3)

    def key(self, node: Node) -> float:
        """Time of entry into its queue."""
        return node.heat

    def enter(self, node: Node) -> None:
        """Into the node's own queue."""
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
        _divide(self._small, upper, lower)

    def absorb(self, parent: Node, child: Node) -> None:
        """A parent was used as often as its child."""
        super().absorb(parent, child)
        parent.frequency = max(parent.frequency, child.frequency)

    def evicted(self, node: Node) -> None:
        """Remember a newcomer that left unused."""
        if node in self._small:
            self._leave_small(node)
            self._ghost[self._fingerprint(node)] = None
            while len(self._ghost) > self._ghost_limit:
                self._ghost.popitem(last=False)

    def _leave_small(self, node: Node) -> None:
        self._small_pages -= self._small.pop(node)

    @staticmethod
    def _fingerprint(node: Node) -> int:
        return hash((node.namespace, node.key))


class GDSF(Policy):
    """Greedy-Dual-Size-Frequency: cost x frequency / size, over a clock that rises with every victim."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0.0

    def used(self, node: Node, tick: int) -> None:
        """Value the node anew."""
        node.heat = self._clock + (1 + node.hits) * node.cost / max(len(node.pages), 1)

    def key(self, node: Node) -> float:
        """The node's value."""
        return node.heat

    def absorb(self, parent: Node, child: Node) -> None:
        """A parent was used as often as its child."""
        super().absorb(parent, child)
        self.used(parent, parent.last_use)

    def evicted(self, node: Node) -> None:
        """Nothing newer may be worth less than what just left."""
        self._clock = max(self._clock, node.heat)


class TTL(Policy):
    """Least recently used, and whatever was not used for `ttl_s` seconds goes by itself."""

    def __init__(self, ttl_s: float):
        super().__init__()
        self._ttl_s = ttl_s

    def key(self, node: Node) -> float:
        """Second of the last use."""
        return node.used_s

    def due(self, now: float) -> bool:
        """Whether the time of the next victim is over."""
        first = self.order.first()
        return first is not None and first[0] + self._ttl_s <= now


_MAKERS: dict[str, Callable[[int, float], Policy]] = {
    "lru": lambda *_: LRU(),
    "lfu": lambda *_: LFU(),
    "slru": lambda capacity, _: SLRU(capacity),
    "s3fifo": lambda capacity, _: S3FIFO(capacity),
    "gdsf": lambda *_: GDSF(),
    "ttl": lambda _, ttl_s: TTL(ttl_s),
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, capacity: int, ttl_s: float = 600.0) -> Policy:
    """A policy by its name, for a pool of `capacity` pages. Raises ValueError for an unknown name."""
    if name not in _MAKERS:
        raise ValueError(f"no eviction policy {name!r}; there are {', '.join(POLICIES)}")
    return _MAKERS[name](capacity, ttl_s)
