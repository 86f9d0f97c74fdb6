"""A memory of the pages that have left a tree: hashes, times and causes, no text."""

from array import array
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from radix.events import Watcher
from radix.hashes import block_hashes, node_hashes
from radix.namespace import Namespace
from radix.node import Node
from radix.stats import Cause

# `expired`: evicted to make room, after its pin or hold had expired and no request had used the page since.
WhyGone = Cause | Literal["expired"]

_WHYS: tuple[WhyGone, ...] = (*get_args(Cause), "expired")


class Left(NamedTuple):
    """When a page left the tree, in seconds of `Gone`'s clock, and why."""

    at_s: float
    why: WhyGone


class Gone(Watcher):
    """Remembers pages that have left the tree, by their chained hashes.

    The table has a fixed size: a page overwrites an older one whose hash falls into the same slot.

    Args:
        page_bytes: bytes of a page's tokens.
        clock: seconds, never going back.
        places: number of slots; a power of 2.

    Attributes:
        since_s: time on the clock from which on pages are remembered.
    """

    def __init__(self, page_bytes: int, clock: Callable[[], float], places: int = 1 << 16):
        self._page_bytes = page_bytes
        self._clock = clock
        self._mask = places - 1
        self._hashes = array("Q", bytes(8 * places))
        self._times = array("d", bytes(8 * places))
        self._codes = bytearray(places)
        self.since_s = clock()

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        expired = cause == "room" and node.used_s <= node.expired_s
        code = _WHYS.index("expired" if expired else cause)
        now_s, mask, hashes, times, codes = self._clock(), self._mask, self._hashes, self._times, self._codes
        for digest in node_hashes(node)[kept_pages:]:
            place = digest & mask
            hashes[place], times[place], codes[place] = digest, now_s, code

    def find(self, key: bytes, page: int, namespace: Namespace) -> Left | None:
        """When and why the page at index `page` of `key` last left the tree; None if unknown."""
        end = (page + 1) * self._page_bytes
        if len(key) < end:
            return None
        digest = block_hashes(key[:end], self._page_bytes, None, namespace)[-1]
        place = digest & self._mask
        return Left(self._times[place], _WHYS[self._codes[place]]) if self._hashes[place] == digest else None
