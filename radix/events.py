"""Watchers of a tree: a log of KV events with chained block hashes, and the latest evictions with their causes."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from radix.eviction import Outlook, Policy
from radix.hashes import last_hash, node_hashes
from radix.namespace import Namespace
from radix.node import Node
from radix.stats import Cause


class Watcher:
    """Callbacks for pages that enter and leave a tree."""

    def stored(self, node: Node) -> None:
        """A leaf was added."""

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """A leaf is about to lose `pages[kept_pages:]`; with `kept_pages` 0 the whole node leaves.

        Called before any change: key, pages, path and meta of the node are intact, and nothing else uses its pages.
        """


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks have entered the tree.

    Attributes:
        hashes: uint64, one per block; each hash covers its block and all blocks before it.
        parent: the hash of the block before the first; None at the root.
        tokens: int32 little-endian tokens of all blocks.
        namespace: the namespace of the blocks; equal tokens have other hashes in another namespace.
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
    """Collects events until `take`. Splitting a node makes no event; attached runs make none."""

    def __init__(self) -> None:
        self._pending: list[Event] = []

    def stored(self, node: Node) -> None:
        if node.is_attached:
            return
        hashes = tuple(node_hashes(node))
        self._pending.append(Stored(hashes, last_hash(node.parent), node.key, node.namespace))

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        if not node.is_attached:
            self._pending.append(Removed(tuple(node_hashes(node)[kept_pages:]), node.namespace))

    def take(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        taken, self._pending = self._pending, []
        return taken


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages of one node that were evicted to make room, or because their tenant exceeded its quota.

    Attributes:
        at_s: the tree's clock at the eviction; idle_s: seconds since the last use.
        cause: `room` or `quota`.
        pages: pages evicted from the end of the node; kept_pages: pages of the node that stayed.
        outlook: the policy's expectation of the node; None if the policy has none.
    """

    at_s: float
    idle_s: float
    cause: Cause
    pages: int
    kept_pages: int
    namespace: Namespace
    outlook: Outlook | None


class Evictions(Watcher):
    """Remembers the latest evictions, without tokens.

    Args:
        policy: the tree's policy.
        clock: the tree's clock.
        most: number of evictions to remember.

    Attributes:
        last: the latest evictions, oldest first.
        pages: number of evicted pages by tenant; flushed pages are not counted.
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
