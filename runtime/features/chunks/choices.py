"""Remembers the rows that were chosen for recent prompts, for equal prompts and later turns of the conversation."""

import hashlib

import msgspec
import numpy as np
from cachetools import LRUCache

from radix import Namespace
from runtime.features.chunks.layout import Layout

MOST_ROWS = 1 << 22
_MOST_TURNS = 16


class Choices:
    """Later turns of a conversation read the same chunks. They use the rows that an earlier turn chose, because the
    KV of these rows is cached. At most `MOST_ROWS` rows are remembered, by LRU over conversations.
    """

    def __init__(self) -> None:
        # By conversation, its turns, longest first: prompt length, digest of the text after the chunks, chosen rows.
        self._known: LRUCache[bytes, list[tuple[int, bytes, np.ndarray]]] = LRUCache(MOST_ROWS, getsizeof=_rows)

    def recall(self, layout: Layout, namespace: Namespace) -> tuple[np.ndarray, int] | None:
        """The choice (rows, int64) made for the longest known prefix of the prompt, and this prefix's length."""
        for length, end, chosen in self._known.get(_key(layout, namespace), ()):
            if length <= len(layout.prompt) and end == _tail(layout, length):
                return chosen, length
        return None

    def keep(self, layout: Layout, namespace: Namespace, chosen: np.ndarray) -> None:
        key, length = _key(layout, namespace), len(layout.prompt)
        turns = [*self._known.pop(key, []), (length, _tail(layout, length), chosen)]
        turns = sorted(turns, key=lambda turn: -turn[0])[:_MOST_TURNS]
        if _rows(turns) <= self._known.maxsize:
            self._known[key] = turns

    def forget(self, layout: Layout, namespace: Namespace) -> None:
        """Drop what the turns of a conversation chose."""
        self._known.pop(_key(layout, namespace), None)

    def clear(self) -> None:
        self._known.clear()


def _rows(turns: list[tuple[int, bytes, np.ndarray]]) -> int:
    return sum(len(chosen) + 1 for _, _, chosen in turns)


def _key(layout: Layout, namespace: Namespace) -> bytes:
    """A hash of the prompt up to the end of the last chunk, and of the ask, positions included."""
    content = msgspec.msgpack.encode((namespace.to_bytes(), layout.prompt[: layout.end].tobytes(), layout.ask))
    return hashlib.blake2b(content, digest_size=16).digest()


def _tail(layout: Layout, length: int) -> bytes:
    tail = layout.prompt[layout.end : length]
    return hashlib.blake2b(tail.tobytes(), digest_size=16).digest()
