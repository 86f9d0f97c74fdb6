"""An index of the blocks that replicas hold."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class PrefixIndex(Generic[R]):
    """Maps chained block hashes to the replicas that hold the block.

    Args:
        remembered: largest number of evicted blocks whose last holder is remembered.
    """

    def __init__(self, remembered: int = 0):
        self._holders: dict[int, set[R]] = {}
        self._held: dict[R, set[int]] = {}
        self._lost: dict[int, R] = {}  # oldest first
        self._remembered = remembered

    def stored(self, replica: R, hashes: Iterable[int]) -> None:
        held = self._held.setdefault(replica, set())
        for value in hashes:
            held.add(value)
            self._lost.pop(value, None)
            self._holders.setdefault(value, set()).add(replica)

    def removed(self, replica: R, hashes: Iterable[int]) -> None:
        self._lost.update(dict.fromkeys(self._take(replica, hashes), replica))
        while len(self._lost) > self._remembered:
            del self._lost[next(iter(self._lost))]

    def _take(self, replica: R, hashes: Iterable[int]) -> list[int]:
        """Remove blocks of a replica. Returns the blocks that no replica holds any more."""
        held: set[int] = self._held.get(replica, set())
        gone: list[int] = []
        for value in hashes:
            if value in held:
                held.discard(value)
                holders = self._holders[value]
                holders.discard(replica)
                if not holders:
                    del self._holders[value]
                    gone.append(value)
        return gone

    def forget(self, replica: R) -> None:
        """Remove a replica and all its blocks."""
        self._take(replica, self.held(replica))
        self._held.pop(replica, None)

    def held(self, replica: R) -> frozenset[int]:
        return frozenset(self._held.get(replica, ()))

    def match(self, hashes: Sequence[int]) -> dict[R, int]:
        """By replica, the number of the prompt's leading blocks that it holds; without replicas that hold none."""
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

    def lost(self, hashes: Sequence[int]) -> tuple[R | None, int]:
        """The last holder of the prompt's longest known prefix that was evicted, and its blocks; else (None, 0)."""
        found: tuple[R | None, int] = (None, 0)
        for number, value in enumerate(hashes, 1):
            if value in self._lost:
                found = self._lost[value], number
            elif value not in self._holders:
                break
        return found
