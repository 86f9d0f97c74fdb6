"""Divergence that was measured while a prefix was served, and the depth and the interval that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

# A prefix is measured with its first so many requests until it is settled, and then with every so many.
_FIRST = _AGAIN = 16
# A trial costs a pass, which so few layers more bring back in a dozen of requests, if they hold.
_LAYERS_APART = 7
# Means follow what is asked: a measurement counts for at least one in so many.
_WINDOW = 16


@dataclass(slots=True)
class Tally:
    """Measurements, in nats: their number, their mean, the largest."""

    count: int = 0
    mean: float = 0.0
    most: float = 0.0

    def add(self, nats: float) -> None:
        self.count += 1
        self.mean += (nats - self.mean) / min(self.count, _WINDOW)
        self.most = max(self.most, nats)


class Ladder:
    """Mean divergence by rung: a depth, or an interval. It grows with the rung, and rung 1 is exact.

    Attributes:
        grain: rungs that lie no further apart are told apart only when the prefix is measured again.
        reach: a rung that is likely within the bound, so that it is the next one to try; 0: none is known.
    """

    def __init__(self, grain: int = 1) -> None:
        self.tallies: dict[int, Tally] = {}
        self.grain = grain
        self.reach = 0

    def note(self, rung: int, nats: float) -> None:
        self.tallies.setdefault(rung, Tally()).add(nats)

    def choose(self, bound: float, start: int) -> int:
        """The largest rung that was measured within the bound; 1 where none was, `start` before any measurement."""
        if bound == 0:
            return min(start, 1)
        return self._around(bound)[0] if self.tallies else start

    def trial(self, bound: float, start: int, top: int) -> int:
        """The rung to measure next, at most `top`; 1, which needs no measurement, where nothing is left to try."""
        if not self.tallies and 1 < start <= top:
            return start
        low, high = self._around(bound)
        if high is None:
            return self.reach if low < self.reach <= top else min(2 * low, top)
        return low if self._is_near(low, high, 1) else (low + high) // 2

    def is_settled(self, bound: float, top: int) -> bool:
        """Whether the rungs above the chosen one are known to exceed the bound, or beyond `top` or `reach`."""
        low, high = self._around(bound)
        unlikely = self.reach + 1 if high is None and self.reach else high
        return bound == 0 or low >= top or (unlikely is not None and self._is_near(low, unlikely, self.grain))

    def _around(self, bound: float) -> tuple[int, int | None]:
        """The largest rung within the bound and below each that exceeds it, and the smallest of these."""
        high = min((rung for rung, tally in self.tallies.items() if tally.mean > bound), default=None)
        within = (rung for rung in self.tallies if high is None or rung < high)
        return max(within, default=1), high

    @staticmethod
    def _is_near(low: int, high: int, grain: int) -> bool:
        return high <= max(low + grain, 3 * low // 2)

    def describe(self) -> dict[str, float]:
        return {str(rung): round(tally.mean, 4) for rung, tally in sorted(self.tallies.items())}


@dataclass(slots=True)
class Ledger:
    """Measurements of a prefix in requests of which it is about the same share.

    Attributes:
        depth: with the prefix reused in so many layers, and refreshed at that step, against no reuse.
        interval: with the other layers so many steps old, against refreshed ones.
        requests: admitted so far.
    """

    depth: Ladder = field(default_factory=lambda: Ladder(_LAYERS_APART))
    interval: Ladder = field(default_factory=Ladder)
    requests: int = 0

    def wants(self, ladder: Ladder, bound: float, top: int) -> bool:
        """Whether the next request measures rungs of one of the ladders, of which it can measure up to `top`."""
        is_new = self.requests < _FIRST and not ladder.is_settled(bound, top)
        return top > 1 and (is_new or self.requests % _AGAIN == 0)


class Measured:
    """The ledgers of a prefix, by the tenth of a request that it is."""

    def __init__(self) -> None:
        self._ledgers: dict[int, Ledger] = {}

    def at(self, ratio: float) -> Ledger:
        """The ledger for a ratio of 0 to 1."""
        return self._ledgers.setdefault(int(10 * ratio + 1e-9), Ledger())

    def describe(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mean nats by depth and by interval, by the least percentage that the prefix is of a request."""
        return {
            str(10 * tenth): {"depth": ledger.depth.describe(), "interval": ledger.interval.describe()}
            for tenth, ledger in sorted(self._ledgers.items())
            if ledger.depth.tallies or ledger.interval.tallies
        }
