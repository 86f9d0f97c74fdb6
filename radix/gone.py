"""A memory of what has left a tree: hashes, times and causes, no text."""

from __future__ import annotations

from collections.abc import Callable
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
    """A watcher that remembers the page with which each removal began.

    Pages leave a path from its end. So the first page that a prompt misses began the latest removal on its path, if it
    was ever there. Its hash covers the namespace and all tokens up to the page's end.

    Args:
        page_bytes: of a page's tokens.
        clock: seconds, never going back.
        most: removals that are remembered; half of them are forgotten at once, the older ones.
    """

    def __init__(self, page_bytes: int, clock: Callable[[], float], most: int = 1 << 15):
        self._page_bytes = page_bytes
        self._clock = clock
        self._most = most
        self._new: dict[int, tuple[float, WhyGone]] = {}
        self._old: dict[int, tuple[float, WhyGone]] = {}
        # Hashes of the tokens up to a node's end, while its children leave. The lower part of a cut ends where all did.
        self._ends: dict[Node, xxhash.xxh64] = {}
        self._unkept: dict[Node, float] = {}

    def stored(self, node: Node) -> None:
        """Nobody asks for a page that is there."""

    def split(self, upper: Node, lower: Node) -> None:
        if lower in self._unkept:
            self._unkept[upper] = self._unkept[lower]

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        why: WhyGone = cause
        if self._unkept and self._unused(node, kept_pages) and cause == "room":
            why = "expired"
        self._ends.pop(node, None)
        assert node.parent is not None
        hashed = (self._ends.get(node.parent) or self._end(node.parent)).copy()
        hashed.update(node.key[: (kept_pages + 1) * self._page_bytes])
        self._new[hashed.intdigest()] = (self._clock(), why)
        if len(self._new) >= self._most // 2:
            self._old, self._new = self._new, {}

    def _unused(self, node: Node, kept_pages: int) -> bool:
        """Whether a pin kept a node until its time was over, and nothing used it since."""
        ended_s = self._unkept.get(node) if kept_pages else self._unkept.pop(node, None)
        return ended_s is not None and node.used_s <= ended_s

    def _end(self, node: Node) -> xxhash.xxh64:
        """The hash of the tokens up to a node's end."""
        if len(self._ends) >= self._most // 8:
            self._ends.clear()
        hashed = xxhash.xxh64(node.namespace.to_bytes())
        for above in reversed(list(path(node))):
            hashed.update(above.key)
            self._ends[above] = hashed.copy()
        if node.parent is None:
            self._ends[node] = hashed
        return hashed

    def unkept(self, node: Node) -> None:
        """The time of a pin is over that kept the path which ends in `node`."""
        for above in path(node):
            if above.pins:
                break
            self._unkept[above] = self._clock()

    def find(self, key: bytes, page: int, namespace: Namespace) -> Left | None:
        """The latest end of a page of `key`, which the tree misses while it has those before; None if unknown."""
        digest = xxhash.xxh64_intdigest(namespace.to_bytes() + key[: (page + 1) * self._page_bytes])
        found = self._new.get(digest) or self._old.get(digest)
        return None if found is None else Left(*found)
