"""Distributions of lengths and times, in the notation of the command line."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NOTATION = "DISTRIBUTION is N, uniform:LOW:HIGH, normal:MEAN:SD[:LOW:HIGH] or lognormal:MEAN:SD[:LOW:HIGH]"
_ARGUMENTS = {"fixed": (1,), "uniform": (2,), "normal": (2, 4), "lognormal": (2, 4)}


@dataclass(frozen=True)
class Distribution:
    """A distribution over non-negative numbers.

    Written as `64` or `fixed:64`, `uniform:LOW:HIGH`, `normal:MEAN:SD[:LOW:HIGH]` or
    `lognormal:MEAN:SD[:LOW:HIGH]`. MEAN and SD (standard deviation) describe the numbers before they are clipped to
    LOW and HIGH.
    """

    kind: str
    arguments: tuple[float, ...]

    @classmethod
    def of(cls, value: Any) -> Any:
        """A distribution from its notation; other values as they are. Raises ValueError."""
        return cls.parse(value) if isinstance(value, str) else value

    @classmethod
    def parse(cls, text: str) -> Distribution:
        """A distribution from its notation. Raises ValueError with the reason."""
        kind, _, rest = text.partition(":") if ":" in text else ("fixed", ":", text)
        if kind not in _ARGUMENTS:
            raise ValueError(f"{text!r}: a distribution is one of {', '.join(_ARGUMENTS)}")
        try:
            numbers = tuple(float(part) for part in rest.split(":"))
        except ValueError:
            raise ValueError(f"{text!r}: {rest!r} are not numbers separated by colons") from None
        if len(numbers) not in _ARGUMENTS[kind]:
            raise ValueError(f"{text!r}: {kind} takes {' or '.join(map(str, _ARGUMENTS[kind]))} numbers")
        if any(not math.isfinite(number) or number < 0 for number in numbers):
            raise ValueError(f"{text!r}: numbers must be finite and not negative")
        return cls(kind, numbers)._checked(text)

    def _checked(self, text: str) -> Distribution:
        bounds = self.arguments if self.kind == "uniform" else self.arguments[2:]
        if bounds and bounds[0] > bounds[1]:
            raise ValueError(f"{text!r}: the lower bound is above the upper one")
        if self.kind == "lognormal" and self.arguments[0] <= 0:
            raise ValueError(f"{text!r}: the mean of a lognormal distribution is above 0")
        return self

    def draw(self, rng: random.Random) -> float:
        """Draw a number."""
        low, high = self.arguments[2:] or (0.0, math.inf)
        return min(max(_DRAW[self.kind](rng, *self.arguments[:2]), low), high)

    def count(self, rng: random.Random, scale: float = 1.0) -> int:
        """Draw a whole number of at least 1, after multiplication by `scale`."""
        return max(round(self.draw(rng) * scale), 1)

    def __str__(self) -> str:
        numbers = [f"{number:g}" for number in self.arguments]
        return numbers[0] if self.kind == "fixed" else ":".join([self.kind, *numbers])


def _lognormal(rng: random.Random, mean: float, deviation: float) -> float:
    variance = math.log1p((deviation / mean) ** 2)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


_DRAW: dict[str, Callable[..., float]] = {
    "fixed": lambda rng, value: value,
    "uniform": lambda rng, low, high: rng.uniform(low, high),
    "normal": lambda rng, mean, deviation: rng.gauss(mean, deviation),
    "lognormal": _lognormal,
}
