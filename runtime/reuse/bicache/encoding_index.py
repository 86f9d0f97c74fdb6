"""An index of encoded prefixes, by their common beginning with a prompt."""

from __future__ import annotations

from sortedcontainers import SortedList

from radix import Namespace


class EncodingIndex:
    """Encoded prefixes in the order of their base namespaces, and within one of their tokens as bytes.

    The key with the longest common beginning with another stands next to the place of that other one.
    """

    def __init__(self) -> None:
        self._order: SortedList = SortedList()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, base: Namespace, key: bytes, encoding: Namespace) -> None:
        self._order.add((base, key, encoding))

    def remove(self, base: Namespace, key: bytes, encoding: Namespace) -> None:
        self._order.remove((base, key, encoding))

    def neighbours(self, base: Namespace, key: bytes) -> list[Namespace]:
        """Encodings before and behind a key's place; one of them has the longest common beginning with it."""
        at = self._order.bisect_left((base, key))
        return [entry[2] for entry in self._order[max(at - 1, 0) : at + 1] if entry[0] == base]
