"""Statistics of how soon sequences of each kind return, and the hits to expect from a cached page."""

from dataclasses import dataclass
from functools import cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

# Ages fall into buckets, two per octave: the square of an age in bucket k has k bits. The last bucket is open.
BUCKETS = 34
EDGES = np.array([0, *(isqrt((1 << k) - 1) + 1 for k in range(BUCKETS))])
_WIDTHS = np.diff(EDGES)

# Lower bounds of the gap classes 1 to 5.
_GAPS = (64, 256, 1024, 4096, 16384)
_FIRST_TURN = 2 + len(_GAPS)
KINDS = _FIRST_TURN + 1 + 3 * (len(_GAPS) + 1)
_OPEN, _CANCELLED = 127, -1

# At least this many Lives are remembered, and at most twice as many.
_MEMORY = 1 << 16
_PRIOR = 100.0
_LEAST = 1e-12


@dataclass(slots=True, eq=False)
class Life:
    """The wait from one use of a sequence to the next, whether the sequence stays cached or not.

    Attributes:
        number: serial number, from 0.
        tick: logical time at which the wait began.
        kind: number of the class of similar waits, see `kind_of`.
        turn: uses of the sequence so far, at most 5.
        gap: class of the previous wait's length, 0 to 5; 0 in the first turn.
        is_over: whether the sequence has returned, or another Life replaces this one.
    """

    number: int
    tick: int
    kind: int
    turn: int
    gap: int
    is_over: bool = False

    @property
    def next_turn(self) -> int:
        return min(self.turn + 1, 5)


def bucket(age: int) -> int:
    return min((age * age).bit_length(), BUCKETS - 1)


def gap_class(age: int) -> int:
    return sum(age >= gap for gap in _GAPS)


def kind_of(turn: int, gap: int, shared: bool) -> int:
    """1 to 6: shared prefixes, by gap; 7: first turns; from 8: three kinds for each gap: turn 2, 3 to 4, 5 or later."""
    if shared:
        return 1 + gap
    return _FIRST_TURN if turn == 1 else _FIRST_TURN + 1 + 3 * gap + (turn > 2) + (turn > 4)


@cache
def describe(kind: int) -> str:
    """A kind in words, for operators."""
    if kind == _FIRST_TURN:
        return "first turn"
    gap, turn = (kind - 1, -1) if kind < _FIRST_TURN else divmod(kind - _FIRST_TURN - 1, 3)
    name = ("turn 2", "turn 3 or 4", "turn 5 or later", "shared prefix")[turn]
    return (
        f"{name}, after less than {_GAPS[gap]} uses" if gap < len(_GAPS) else f"{name}, after {_GAPS[-1]} uses or more"
    )


class Returns:
    """Counts, by kind and bucket, the Lives that entered the bucket, and those of them that returned in it."""

    def __init__(self) -> None:
        self._ticks = np.zeros(2 * _MEMORY, dtype=np.int64)
        self._kinds = np.zeros(2 * _MEMORY, dtype=np.int64)
        self._ends = np.zeros(2 * _MEMORY, dtype=np.int8)
        self._begun = self._forgotten = 0
        # For each bucket, the number of the first Life that has not outgrown it.
        self._next = np.zeros(BUCKETS, dtype=np.int64)
        self._entered = np.zeros((KINDS, BUCKETS))
        self._ended = np.zeros((KINDS, BUCKETS))

    def begin(self, tick: int, turn: int, gap: int, shared: bool = False) -> Life:
        """Begin a wait at `tick`, which must be later than in earlier calls."""
        life = Life(self._begun, tick, kind_of(turn, gap, shared), turn, gap)
        if self._begun - self._forgotten == 2 * _MEMORY:
            for column in (self._ticks, self._kinds, self._ends):
                column[:_MEMORY] = column[_MEMORY:]
            self._forgotten += _MEMORY
            self._next = np.maximum(self._next, self._forgotten)
        at = self._begun - self._forgotten
        self._ticks[at], self._kinds[at], self._ends[at] = tick, life.kind, _OPEN
        self._begun += 1
        return life

    def end(self, life: Life, tick: int) -> None:
        """The sequence has returned."""
        self._close(life, bucket(tick - life.tick))

    def cancel(self, life: Life) -> None:
        """Stop the observation: whether the sequence would have returned stays unknown."""
        self._close(life, _CANCELLED)

    def _close(self, life: Life, end: int) -> None:
        life.is_over = True
        if life.number >= self._forgotten:
            self._ends[life.number - self._forgotten] = end

    def learn(self, now: int) -> None:
        """Update both counts with the buckets that Lives have outgrown since the last call."""
        reached = self._forgotten + np.searchsorted(
            self._ticks[: self._begun - self._forgotten], now - EDGES[1:], side="right"
        )
        counts = reached - self._next
        buckets = np.repeat(np.arange(BUCKETS), counts)
        # The Lives to count are a consecutive range for each bucket.
        lives = np.arange(len(buckets)) + np.repeat(self._next - self._forgotten - (np.cumsum(counts) - counts), counts)
        ends, cells = self._ends[lives], self._kinds[lives] * BUCKETS + buckets
        for table, chosen in ((self._entered, ends >= buckets), (self._ended, ends == buckets)):
            table += np.bincount(cells[chosen], minlength=table.size).reshape(table.shape)
        self._next = reached

    def halve(self) -> None:
        """Halve the weight of everything learned."""
        self._entered /= 2
        self._ended /= 2

    def promises(self) -> NDArray[np.float64]:
        """Expected hits per page and tick, float64 [kinds, buckets], if a page is kept for as long as that pays.

        This is a Gittins index: the largest ratio of hits to time, over all later ages at which to give up.
        """
        chance = self._chances()
        # The share of Lives that enters each bucket; returns happen halfway through a bucket on average.
        present = np.cumprod(1 - chance, axis=1) / (1 - chance)
        hits, time = present * chance, present * _WIDTHS * (1 - chance / 2)
        later = np.tri(BUCKETS).T
        hits, time = (np.cumsum(part[:, None, :] * later, axis=2) for part in (hits, time))
        # If nothing has ever returned, the oldest still goes first.
        return np.maximum(np.divide(hits, time, out=np.zeros_like(hits), where=time > 0).max(axis=2), _LEAST)

    def _chances(self) -> NDArray[np.float64]:
        """The share of the Lives in a bucket that return in it; rare kinds are drawn towards the mean of all chats."""
        entered, ended = (_smooth(table[_FIRST_TURN:].sum(axis=0)) for table in (self._entered, self._ended))
        usual = ended / np.maximum(entered, 1e-9)
        often = (self._ended.sum(axis=1) + 5) / ((self._entered * usual).sum(axis=1) + 5)
        expected = _PRIOR * often[:, None] * usual
        return np.minimum((self._ended + expected) / (self._entered + _PRIOR), 0.98) * (_WIDTHS > 0)


def _smooth(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add half the weight of each neighbouring bucket."""
    around = np.pad(counts, 1, mode="edge")
    return 2 * counts + around[:-2] + around[2:]
