"""An index of encoded prefixes, by their common beginning with a prompt."""

from __future__ import annotations

from sortedcontainers import SortedList

from radix import Namespace


class EncodingIndex:
    """Encoded prefixes by base namespace, in the order of their tokens as bytes.

    The key with the longest common beginning with another stands next to the place of that other one.
    """

    def __init__(self) -> None:
        self._order: dict[Namespace, SortedList] = {}

    def add(self, base: Namespace, key: bytes, encoding: Namespace) -> None:
        order = self._order.setdefault(base, SortedList())
        if (key, encoding) not in order:
            order.add((key, encoding))

    def discard(self, base: Namespace, key: bytes, encoding: Namespace) -> None:
        order = self._order[base]
        order.discard((key, encoding))
        if not order:
            del self._order[base]

    def keep(self, encodings: set[Namespace]) -> None:
        """Discard all encodings but these."""
        left = {base: SortedList(e for e in order if e[1] in encodings) for base, order in self._order.items()}
        self._order = {base: order for base, order in left.items() if order}

    def neighbours(self, base: Namespace, key: bytes) -> list[tuple[bytes, Namespace]]:
        """Key and encoding before and behind a key's place; one of them has the longest common beginning with it."""
        order = self._order.get(base)
        if order is None:
            return []
        at = order.bisect_left((key,))
        return list(order[max(at - 1, 0) : at + 1])
