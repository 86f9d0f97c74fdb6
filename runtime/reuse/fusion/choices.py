"""The rows that were chosen for recent prompts: a prompt that comes again, or goes on, keeps them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec
import numpy as np

from radix import Namespace
from runtime.reuse.fusion.layout import Layout

MOST_ROWS = 1 << 22
_MOST_TURNS = 16


class Choices:
    """A conversation's later turns read the same documents: what the first question chose serves them all, and the
    cache has it. The oldest conversations are forgotten when all of them have too many rows.

    Attributes:
        num_rows: rows of all choices, a choice counted as one more.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, list[tuple[int, bytes, np.ndarray]]] = OrderedDict()
        self.num_rows = 0

    def recall(self, layout: Layout, namespace: Namespace) -> tuple[np.ndarray, int] | None:
        """The rows int64 that were chosen for the longest beginning of the prompt, and its length."""
        key = _key(layout, namespace)
        for length, digest, chosen in self._known.get(key, ()):
            if length <= len(layout.prompt) and digest == _tail(layout, length):
                self._known.move_to_end(key)
                return chosen, length
        return None

    def keep(self, layout: Layout, namespace: Namespace, chosen: np.ndarray) -> None:
        key, length = _key(layout, namespace), len(layout.prompt)
        before = self._known.pop(key, [])
        turns = sorted([*before, (length, _tail(layout, length), chosen)], key=lambda turn: -turn[0])[:_MOST_TURNS]
        self._known[key] = turns
        self.num_rows += _rows(turns) - _rows(before)
        while self.num_rows > MOST_ROWS:
            self.num_rows -= _rows(self._known.popitem(last=False)[1])

    def clear(self) -> None:
        self._known.clear()
        self.num_rows = 0


def _rows(turns: list[tuple[int, bytes, np.ndarray]]) -> int:
    return sum(len(chosen) + 1 for _, _, chosen in turns)


def _key(layout: Layout, namespace: Namespace) -> bytes:
    """Documents, what stands before and between them, and what is asked of them."""
    before = layout.prompt[: layout.asked.documents[-1][1]].tobytes()
    content = msgspec.msgpack.encode((namespace.to_bytes(), before, msgspec.to_builtins(layout.asked)))
    return hashlib.blake2b(content, digest_size=16).digest()


def _tail(layout: Layout, length: int) -> bytes:
    tail = layout.prompt[layout.asked.documents[-1][1] : length]
    return hashlib.blake2b(tail.tobytes(), digest_size=16).digest()
