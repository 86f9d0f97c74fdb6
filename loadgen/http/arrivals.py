"""Arrival processes: the times at which sessions begin."""

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Closed:
    """`concurrency` users, each of which begins its next session when the last one has ended."""

    concurrency: int

    def __str__(self) -> str:
        return f"closed loop, {self.concurrency} at a time"


@dataclass(frozen=True)
class Recorded:
    """The times of a trace."""

    def __str__(self) -> str:
        return "as recorded"


@dataclass(frozen=True)
class Gamma:
    """An open loop with gamma-distributed gaps: a `burstiness` of 1 is Poisson, less is burstier, more is regular."""

    rate: float
    burstiness: float = 1.0

    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds since the start, ascending, without end."""
        at_s = 0.0
        while True:
            at_s += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            yield at_s

    def __str__(self) -> str:
        return f"{'Poisson' if self.burstiness == 1 else f'gamma of {self.burstiness:g}'}, {self.rate:g}/s"


Arrivals = Closed | Gamma | Recorded
