"""The blocks that replicas hold, by hash."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class PrefixIndex(Generic[R]):
    """Blocks by their chained hashes, and the replicas that hold each."""

    def __init__(self) -> None:
        self._holders: dict[int, set[R]] = {}
        self._held: dict[R, set[int]] = {}

    def stored(self, replica: R, hashes: Iterable[int]) -> None:
        held = self._held.setdefault(replica, set())
        for value in hashes:
            held.add(value)
            self._holders.setdefault(value, set()).add(replica)

    def removed(self, replica: R, hashes: Iterable[int]) -> None:
        held = self._held.get(replica, set())
        for value in hashes:
            if value in held:
                held.discard(value)
                holders = self._holders[value]
                holders.discard(replica)
                if not holders:
                    del self._holders[value]

    def forget(self, replica: R) -> None:
        """A replica holds nothing, as far as anybody knows."""
        self.removed(replica, self.held(replica))
        self._held.pop(replica, None)

    def held(self, replica: R) -> frozenset[int]:
        return frozenset(self._held.get(replica, ()))

    def match(self, hashes: Sequence[int]) -> dict[R, int]:
        """Leading blocks of a prompt that each replica holds; replicas without any are left out."""
        found: dict[R, int] = {}
        left: set[R] | None = None
        for number, value in enumerate(hashes):
            holders = self._holders.get(value, set())
            here = holders if left is None else left & holders
            found.update(dict.fromkeys((left or set()) - here, number))
            if not here:
                return found
            left = here
        return found | dict.fromkeys(left or (), len(hashes))
