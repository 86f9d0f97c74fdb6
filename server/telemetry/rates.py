"""Rates and percentiles over a recent window of time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable


class Recent:
    """Values of the last `window_s` seconds, `most` at most."""

    def __init__(self, window_s: float = 30.0, most: int = 512, clock: Callable[[], float] = time.monotonic):
        self._window_s = window_s
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, value: float) -> None:
        self._values.append((self._clock(), value))

    def percentile(self, point: float) -> float | None:
        """The nearest-rank percentile over the window; None without values."""
        since = self._clock() - self._window_s
        values = sorted(value for at, value in self._values if at >= since)
        return values[max(math.ceil(point / 100 * len(values)) - 1, 0)] if values else None


class Rate:
    """Events per second over the last `window_s` seconds."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._window_s = window_s
        self._clock = clock
        self._started_s = clock()
        self._seconds: deque[tuple[int, int]] = deque()

    def add(self, amount: int) -> None:
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        else:
            self._forget()
        self._seconds.append((second, amount))

    def per_second(self) -> float:
        """The mean over the window, or over the time since start while that is shorter."""
        self._forget()
        elapsed = min(self._clock() - self._started_s, self._window_s)
        return sum(amount for _, amount in self._seconds) / max(elapsed, 1.0)

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while self._seconds and self._seconds[0][0] < oldest:
            self._seconds.popleft()
