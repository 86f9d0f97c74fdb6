"""Finds the encoded prefix that begins most like a prompt."""

from __future__ import annotations

from sortedcontainers import SortedList

from radix import Namespace


class EncodingIndex:
    """Encoded prefixes by base namespace, in the order of their tokens as bytes.

    Of all strings, the one with the longest common beginning stands next to where the string in question would.
    """

    def __init__(self) -> None:
        self._order: dict[Namespace, SortedList] = {}

    def add(self, base: Namespace, key: bytes, encoding: Namespace) -> None:
        """Know an encoding, once."""
        order = self._order.setdefault(base, SortedList())
        if (key, encoding) not in order:
            order.add((key, encoding))

    def discard(self, base: Namespace, key: bytes, encoding: Namespace) -> None:
        """Forget an encoding."""
        order = self._order[base]
        order.discard((key, encoding))
        if not order:
            del self._order[base]

    def keep(self, encodings: set[Namespace]) -> None:
        """Forget all others."""
        left = {base: SortedList(e for e in order if e[1] in encodings) for base, order in self._order.items()}
        self._order = {base: order for base, order in left.items() if order}

    def neighbours(self, base: Namespace, key: bytes) -> list[tuple[bytes, Namespace]]:
        """Key and encoding of what stands before and behind a key; one of them begins most like it."""
        order = self._order.get(base)
        if order is None:
            return []
        at = order.bisect_left((key,))
        return list(order[max(at - 1, 0) : at + 1])
