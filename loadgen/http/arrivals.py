"""Arrival processes: the times at which sessions begin."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
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


class Open(ABC):
    """Open-loop arrivals: their times do not depend on the server."""

    @abstractmethod
    def times(self, rng: random.Random) -> Iterator[float]:
        """Seconds since the start, ascending, without end."""


@dataclass(frozen=True)
class Constant(Open):
    """Every 1 / rate seconds."""

    rate: float

    def times(self, rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate
            number += 1

    def __str__(self) -> str:
        return f"constant, {self.rate:g}/s"


@dataclass(frozen=True)
class Gamma(Open):
    """Gamma-distributed gaps of shape `burstiness`: 1 is Poisson, below 1 is burstier, above 1 is more regular."""

    rate: float
    burstiness: float = 1.0

    def times(self, rng: random.Random) -> Iterator[float]:
        at_s = 0.0
        while True:
            at_s += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            yield at_s

    def __str__(self) -> str:
        return f"{'Poisson' if self.burstiness == 1 else f'gamma of {self.burstiness:g}'}, {self.rate:g}/s"


@dataclass(frozen=True)
class Ramp(Open):
    """Poisson arrivals whose rate changes linearly to `end_rate` within `seconds`, and then stays."""

    rate: float
    end_rate: float
    seconds: float

    def times(self, rng: random.Random) -> Iterator[float]:
        expected = 0.0
        while True:
            expected += rng.expovariate(1.0)
            yield self._instant(expected)

    def _instant(self, expected: float) -> float:
        """The time by which `expected` arrivals are due: the inverse of the integral of the rate."""
        slope = (self.end_rate - self.rate) / self.seconds
        at_end = (self.rate + self.end_rate) / 2 * self.seconds
        if expected >= at_end:
            return self.seconds + (expected - at_end) / self.end_rate
        # The smaller root of slope / 2 t^2 + rate t = expected, in the form that holds for a slope of 0.
        return 2 * expected / (self.rate + math.sqrt(max(self.rate**2 + 2 * slope * expected, 0.0)))

    def __str__(self) -> str:
        return f"Poisson, {self.rate:g} to {self.end_rate:g}/s over {self.seconds:g} s"


Arrivals = Closed | Open | Recorded
