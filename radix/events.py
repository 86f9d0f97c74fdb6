"""Those who follow a tree: KV events of blocks under chained hashes, and a short memory of who was evicted and why."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from radix.eviction import Outlook, Policy
from radix.namespace import Namespace
from radix.node import Node
from radix.stats import Cause
from radix.tree import Watcher


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks have come into the tree.

    Attributes:
        hashes: unsigned 64 bit, one a block; each is chained to the block before it.
        parent: the hash of the block before the first; None at the root.
        tokens: int32 little-endian, all blocks' tokens.
        namespace: the blocks'; the hashes of different namespaces differ.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks are no longer in the tree."""

    hashes: tuple[int, ...]
    namespace: Namespace


Event = Stored | Removed


def block_hashes(tokens: bytes, block_bytes: int, parent: int | None, namespace: Namespace) -> tuple[int, ...]:
    """Chained xxhash64 of whole blocks: over the parent's hash (at the root, the namespace's) and the tokens."""
    chained = xxhash.xxh64_intdigest(namespace.to_bytes()) if parent is None else parent
    hashes = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        chained = xxhash.xxh64_intdigest(chained.to_bytes(8, "little") + tokens[start : start + block_bytes])
        hashes.append(chained)
    return tuple(hashes)


class EventLog(Watcher):
    """A watcher that collects the tree's changes until they are taken; a split is none that others can see."""

    def __init__(self, block_bytes: int):
        self._block_bytes = block_bytes
        self._hashes: dict[Node, array[int]] = {}
        self._pending: list[Event] = []

    def stored(self, node: Node) -> None:
        parent = self._hashes[node.parent][-1] if node.parent in self._hashes else None
        hashes = block_hashes(node.key, self._block_bytes, parent, node.namespace)
        self._hashes[node] = array("Q", hashes)
        self._pending.append(Stored(hashes, parent, node.key, node.namespace))

    def split(self, upper: Node, lower: Node) -> None:
        hashes = self._hashes[lower]
        self._hashes[upper], self._hashes[lower] = hashes[: len(upper.pages)], hashes[len(upper.pages) :]

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        hashes = self._hashes[node]
        self._pending.append(Removed(tuple(hashes[kept_pages:]), node.namespace))
        if kept_pages:
            self._hashes[node] = hashes[:kept_pages]
        else:
            del self._hashes[node]

    def take(self) -> list[Event]:
        """All changes since the last call."""
        taken, self._pending = self._pending, []
        return taken


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages that left because others needed the room, or because of their tenant's quota.

    Attributes:
        at_s: the tree's clock then; idle_s: seconds since their last use.
        cause: why somebody had to go.
        pages: how many went, from the end of a run; kept_pages: how many of it stayed.
        namespace: theirs.
        outlook: why it was these, if the policy says.
    """

    at_s: float
    idle_s: float
    cause: Cause
    pages: int
    kept_pages: int
    namespace: Namespace
    outlook: Outlook | None


class Evictions(Watcher):
    """A watcher that remembers the last evictions, without their tokens.

    Args:
        policy: the tree's.
        clock: the tree's.
        most: how many are remembered.

    Attributes:
        last: the oldest first.
        pages: how many left since the start, by tenant; flushes are not counted.
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
