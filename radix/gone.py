"""A memory of what has left a tree: hashes, times and causes, no text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import xxhash

from radix.namespace import Namespace
from radix.node import Node
from radix.stats import Cause
from radix.tree import path

# `expired`: room was needed, and nothing had used the page since the end of the pin that had kept it.
WhyGone = Cause | Literal["expired"]


class Left(NamedTuple):
    """The end of a page's stay: the time on the memory's clock, and the cause."""

    at_s: float
    why: WhyGone


class Gone:
    """A watcher that remembers pages that have left, by hashes chained from the namespace through all pages before.

    Args:
        page_bytes: of a page's tokens.
        clock: seconds, never going back.
        most: pages that are remembered; half of them are forgotten at once, the older ones.
    """

    def __init__(self, page_bytes: int, clock: Callable[[], float], most: int = 1 << 16):
        self._page_bytes = page_bytes
        self._clock = clock
        self._most = most
        self._new: dict[int, tuple[float, WhyGone]] = {}
        self._old: dict[int, tuple[float, WhyGone]] = {}
        # Hashes of the last pages of nodes whose children leave, and of all pages of those that leave bit by bit.
        self._ends: dict[Node, int] = {}
        self._chains: dict[Node, array[int]] = {}
        self._unkept: dict[Node, float] = {}

    def stored(self, node: Node) -> None:
        """Nobody asks for a page that is there."""

    def split(self, upper: Node, lower: Node) -> None:
        """The lower part ends where all did."""
        if (chain := self._chains.get(lower)) is not None:
            self._chains[lower] = chain[len(upper.pages) :]
        if lower in self._unkept:
            self._unkept[upper] = self._unkept[lower]

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        why: WhyGone = cause
        if self._unkept and self._unused(node, kept_pages) and cause == "room":
            why = "expired"
        if len(self._new) >= self._most // 2:
            self._old, self._new = self._new, {}
        left, parent, width = (self._clock(), why), node.parent, self._page_bytes
        self._ends.pop(node, None)
        if kept_pages or node in self._chains:
            chain = self._chains.pop(node, None) or array("Q", _hashes(node.key, width, self._end(parent)))
            self._new.update(dict.fromkeys(chain[kept_pages:], left))
            if kept_pages:
                if len(self._chains) >= self._most // 8:
                    self._chains.clear()
                self._chains[node] = chain[:kept_pages]
        else:
            before = self._ends.get(parent) or self._end(parent)  # type: ignore[arg-type]
            for digest in _hashes(node.key, width, before):
                self._new[digest] = left

    def _unused(self, node: Node, kept_pages: int) -> bool:
        """Whether a pin kept a node until its time was over, and nothing used it since."""
        ended_s = self._unkept.get(node) if kept_pages else self._unkept.pop(node, None)
        return ended_s is not None and node.used_s <= ended_s

    def _end(self, node: Node | None) -> int:
        """The hash of a node's last page; at a root, of the namespace."""
        if len(self._ends) >= self._most // 8:
            self._ends.clear()
        unknown = []
        while node is not None and node not in self._ends:
            unknown.append(node)
            node = node.parent
        digest = 0 if node is None else self._ends[node]
        for node in reversed(unknown):
            if node.parent is None:
                digest = xxhash.xxh64_intdigest(node.namespace.to_bytes())
            self._ends[node] = digest = [digest, *_hashes(node.key, self._page_bytes, digest)][-1]
        return digest

    def unkept(self, node: Node) -> None:
        """The time of a pin is over that kept the path which ends in `node`."""
        for above in path(node):
            if above.pins:
                break
            self._unkept[above] = self._clock()

    def find(self, key: bytes, page: int, namespace: Namespace) -> Left | None:
        """The latest end of a page of `key`, which the tree misses while it has those before; None if unknown."""
        end, seed = (page + 1) * self._page_bytes, xxhash.xxh64_intdigest(namespace.to_bytes())
        if len(key) < end:
            return None
        *_, digest = _hashes(key[:end], self._page_bytes, seed)
        found = self._new.get(digest) or self._old.get(digest)
        return None if found is None else Left(*found)


def _hashes(run: bytes, page_bytes: int, digest: int) -> Iterator[int]:
    """Hashes of whole pages, each chained to the one before; `digest`: of that before the first."""
    for start in range(0, len(run) - page_bytes + 1, page_bytes):
        digest = xxhash.xxh64_intdigest(run[start : start + page_bytes], digest)
        yield digest
