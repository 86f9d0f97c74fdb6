"""A memory of what has left a tree: hashes, times and causes, no text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

from xxhash import xxh64_intdigest

from radix.namespace import Namespace
from radix.node import Node
from radix.stats import Cause
from radix.tree import Watcher, path

# `expired`: room was needed, and nothing had used the page since the end of the pin that had kept it.
WhyGone = Cause | Literal["expired"]

# Nodes of which hashes are kept.
_MOST_NODES = 1 << 12
_WHYS: tuple[WhyGone, ...] = (*get_args(Cause), "expired")
_CODES = {why: code for code, why in enumerate(_WHYS)}


class Left(NamedTuple):
    """The end of a page's stay: the time on the memory's clock, and the cause."""

    at_s: float
    why: WhyGone


class Gone(Watcher):
    """A watcher that remembers pages that have left, by hashes chained from the namespace through all pages before.

    A page takes the place of the one that was remembered at the same remainder of its hash.

    Args:
        page_bytes: of a page's tokens.
        clock: seconds, never going back.
        places: for pages; a power of 2.

    Attributes:
        since_s: the beginning of the memory.
    """

    def __init__(self, page_bytes: int, clock: Callable[[], float], places: int = 1 << 16):
        self._page_bytes = page_bytes
        self._clock = clock
        self._mask = places - 1
        self._hashes = array("Q", bytes(8 * places))
        self._times = array("d", bytes(8 * places))
        self._codes = bytearray(places)
        self.since_s = clock()
        # Hashes of the last pages of nodes whose children leave, and of all pages of those that leave bit by bit.
        self._ends: dict[Node, int] = {}
        self._chains: dict[Node, array[int]] = {}
        self._unkept: dict[Node, float] = {}

    def split(self, upper: Node, lower: Node) -> None:
        """The lower part ends where all did."""
        if (chain := self._chains.get(lower)) is not None:
            self._chains[lower] = chain[len(upper.pages) :]
        if lower in self._unkept:
            self._unkept[upper] = self._unkept[lower]

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        code, parent = _CODES[cause], node.parent
        if self._unkept and self._unused(node, kept_pages) and cause == "room":
            code = _CODES["expired"]
        self._ends.pop(node, None)
        chain: Iterable[int]
        if kept_pages or (self._chains and node in self._chains):
            chain = self._cut(node, kept_pages)
        else:
            chain = _chained(node.key, self._page_bytes, self._ends.get(parent) or self._end(parent))  # type: ignore[arg-type]
        now_s, mask, hashes, times, codes = self._clock(), self._mask, self._hashes, self._times, self._codes
        for digest in chain:
            place = digest & mask
            hashes[place], times[place], codes[place] = digest, now_s, code

    def _cut(self, node: Node, kept_pages: int) -> array[int]:
        """The hashes of the pages that leave a node; those of the others are kept for the next time."""
        chain = self._chains.pop(node, None)
        if chain is None:
            chain = array("Q", _chained(node.key, self._page_bytes, self._end(node.parent)))
        if kept_pages:
            if len(self._chains) >= _MOST_NODES:
                self._chains.clear()
            self._chains[node] = chain[:kept_pages]
        return chain[kept_pages:]

    def _unused(self, node: Node, kept_pages: int) -> bool:
        """Whether a pin kept a node until its time was over, and nothing used it since."""
        ended_s = self._unkept.get(node) if kept_pages else self._unkept.pop(node, None)
        return ended_s is not None and node.used_s <= ended_s

    def _end(self, node: Node | None) -> int:
        """The hash of a node's last page; at a root, of the namespace."""
        if len(self._ends) >= _MOST_NODES:
            self._ends.clear()
        unknown = []
        while node is not None and node not in self._ends:
            unknown.append(node)
            node = node.parent
        digest = 0 if node is None else self._ends[node]
        for node in reversed(unknown):
            if node.parent is None:
                digest = xxh64_intdigest(node.namespace.to_bytes())
            self._ends[node] = digest = [digest, *_chained(node.key, self._page_bytes, digest)][-1]
        return digest

    def unkept(self, node: Node) -> None:
        """The time of a pin is over that kept the path which ends in `node`."""
        for above in path(node):
            if above.pins:
                break
            self._unkept[above] = self._clock()

    def find(self, key: bytes, page: int, namespace: Namespace) -> Left | None:
        """The latest end of a page of `key`, which the tree misses while it has those before; None if unknown."""
        end = (page + 1) * self._page_bytes
        if len(key) < end:
            return None
        *_, digest = _chained(key[:end], self._page_bytes, xxh64_intdigest(namespace.to_bytes()))
        place = digest & self._mask
        return Left(self._times[place], _WHYS[self._codes[place]]) if self._hashes[place] == digest else None


def _chained(run: bytes, page_bytes: int, digest: int) -> list[int]:
    """Hashes of whole pages, each chained to the one before; `digest`: of that before the first."""
    chain = []
    for start in range(0, len(run) - page_bytes + 1, page_bytes):
        digest = xxh64_intdigest(run[start : start + page_bytes], digest)
        chain.append(digest)
    return chain
