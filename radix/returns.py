"""Statistics of how soon sequences of each kind return, and the hits to expect from a cached page."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from math import isqrt

import numpy as np
from numpy.typing import NDArray

# Ages fall into buckets, two per octave: the square of an age in bucket k has k bits. The last bucket is open.
BUCKETS = 34
EDGES = np.array([0, *(isqrt((1 << k) - 1) + 1 for k in range(BUCKETS))])
_WIDTHS = np.diff(EDGES)

# Lower bounds of the gap classes 1 to 11.
_GAPS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
_FIRST_TURN = 2 + len(_GAPS)
KINDS = _FIRST_TURN + 1 + 3 * (len(_GAPS) + 1)
_OPEN, _CANCELLED = 127, -1

# At least this many Lives are remembered, and at most twice as many.
_MEMORY = 1 << 16
_LEAST = 1e-12
# Weights, in Lives, of what is expected of a kind and of all kinds before they have been observed.
_PRIOR, _FIRST_PRIOR = 30.0, 50.0
# Chances of a return by bucket before anything has returned; they make the order LRU.
_FIRST_CHANCES = 0.001 * _WIDTHS / (EDGES[:-1] + _WIDTHS / 2 + 1)
# The mean gap is that of this many waits.
_MOST_TURNS = 10


@dataclass(slots=True, eq=False)
class Life:
    """The wait from one use of a sequence to the next, whether the sequence stays cached or not.

    Attributes:
        number: serial number, from 0.
        tick: logical time at which the wait began.
        kind: number of the class of similar waits, see `kind_of`.
        turn: uses of the sequence so far, at most 10.
        gap: mean length of the previous waits; 0 in the first turn.
        is_over: whether the sequence has returned, or another Life replaces this one.
    """

    number: int
    tick: int
    kind: int
    turn: int
    gap: float
    is_over: bool = False

    def next_turn(self, tick: int) -> tuple[int, float]:
        """Turn and mean gap of the next wait, if the sequence returns at `tick`."""
        return min(self.turn + 1, _MOST_TURNS), self.gap + (tick - self.tick - self.gap) / self.turn


def bucket(age: int) -> int:
    return min((age * age).bit_length(), BUCKETS - 1)


def kind_of(turn: int, gap: float, shared: bool) -> int:
    """1 to 12: shared prefixes, by gap; 13: first turns; from 14: three kinds a gap: turn 2, 3 to 4, 5 or later."""
    if turn == 1:
        return _FIRST_TURN
    gap_class = bisect_right(_GAPS, gap)
    return 1 + gap_class if shared else _FIRST_TURN + 1 + 3 * gap_class + (turn > 2) + (turn > 4)


@cache
def describe(kind: int) -> str:
    """A kind in words, for operators."""
    if kind == _FIRST_TURN:
        return "first turn"
    gap, turn = (kind - 1, -1) if kind < _FIRST_TURN else divmod(kind - _FIRST_TURN - 1, 3)
    name = ("turn 2", "turn 3 or 4", "turn 5 or later", "shared prefix")[turn]
    return f"{name}, mean gap " + (f"below {_GAPS[gap]} uses" if gap < len(_GAPS) else f"of {_GAPS[-1]} uses or more")


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

    def begin(self, tick: int, turn: int, gap: float, shared: bool = False) -> Life:
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
        chance = self._chances().T.copy()
        # Hits and time: in each bucket, and from bucket k to the end of each. Returns come halfway through a bucket.
        each = np.stack((chance, (_WIDTHS[:, None] + _LEAST) * (1 - chance / 2)))
        stays, sums, promises = 1 - chance, np.zeros_like(each), np.empty_like(chance)
        for k in reversed(range(BUCKETS)):
            later = sums[:, k:]
            later *= stays[k]
            later += each[:, k, None]
            promises[k] = (later[0] / later[1]).max(axis=0)
        return promises.T

    def _chances(self) -> NDArray[np.float64]:
        """The share of the Lives in a bucket that return in it; rare kinds are drawn towards the mean of all chats."""
        entered, ended = (_smooth(table[_FIRST_TURN:].sum(axis=0)) for table in (self._entered, self._ended))
        usual = ended / (entered + _FIRST_PRIOR)
        often = (self._ended.sum(axis=1) + 5) / ((self._entered * usual).sum(axis=1) + 5)
        expected = _PRIOR * often[:, None] * usual
        learned = (self._ended + expected) / (self._entered + _PRIOR)
        return np.minimum(learned + _FIRST_CHANCES, 0.98) * (_WIDTHS > 0)


def _smooth(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add half the weight of each neighbouring bucket."""
    around = np.pad(counts, 1, mode="edge")
    return 2 * counts + around[:-2] + around[2:]
