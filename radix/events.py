"""Watchers of a tree: KV events of blocks under chained hashes, and the last evictions with their reasons."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from radix.eviction import Outlook, Policy
from radix.hashes import last_hash, node_hashes
from radix.namespace import Namespace
from radix.node import Node
from radix.stats import Cause


class Watcher:
    """Follows the pages that enter and leave a tree."""

    def stored(self, node: Node) -> None:
        """A leaf was added."""

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """The pages of a leaf from `kept_pages` on leave; with 0 the node does.

        Called before any change: the node has its key, pages, path and meta, and its pages have no other owner.
        """


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks have entered the tree.

    Attributes:
        hashes: uint64, one a block; each is chained to the block before it.
        parent: the hash of the block before the first; None at the root.
        tokens: int32 little-endian tokens of all blocks.
        namespace: of the blocks; the hashes of different namespaces differ.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks have left the tree."""

    hashes: tuple[int, ...]
    namespace: Namespace


Event = Stored | Removed


class EventLog(Watcher):
    """Collects the tree's changes until they are taken. Splitting a node is no event."""

    def __init__(self) -> None:
        self._pending: list[Event] = []

    def stored(self, node: Node) -> None:
        hashes = tuple(node_hashes(node))
        self._pending.append(Stored(hashes, last_hash(node.parent), node.key, node.namespace))

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        self._pending.append(Removed(tuple(node_hashes(node)[kept_pages:]), node.namespace))

    def take(self) -> list[Event]:
        """All changes since the last call."""
        taken, self._pending = self._pending, []
        return taken


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages that were evicted for want of room, or because of their tenant's quota.

    Attributes:
        at_s: the tree's clock at the eviction; idle_s: seconds since the last use.
        cause: the reason for an eviction at all.
        pages: pages evicted from the end of a run; kept_pages: pages of the run that stayed.
        outlook: the policy's reason for choosing these pages, if it gives one.
    """

    at_s: float
    idle_s: float
    cause: Cause
    pages: int
    kept_pages: int
    namespace: Namespace
    outlook: Outlook | None


class Evictions(Watcher):
    """Remembers the last evictions, without their tokens.

    Args:
        policy: the tree's policy.
        clock: the tree's clock.
        most: number of evictions to remember.

    Attributes:
        last: the oldest first.
        pages: evicted pages by tenant; flushed pages are not counted.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float], most: int = 50):
        self._policy = policy
        self._clock = clock
        self.last: deque[Eviction] = deque(maxlen=most)
        self.pages: Counter[str] = Counter()

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        if cause != "flush":
            now, pages = self._clock(), len(node.pages) - kept_pages
            self.pages[node.namespace.tenant] += pages
            outlook = self._policy.outlook(node)
            self.last.append(Eviction(now, now - node.used_s, cause, pages, kept_pages, node.namespace, outlook))
