"""Rates and percentiles over a sliding window of time."""

import math
import time
from collections import deque
from collections.abc import Callable


class Recent:
    """The values of the last `window_s` seconds."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic):
        self._window_s = window_s
        self._clock = clock
        self._started_s = clock()
        self._values: deque[tuple[float, float]] = deque()

    def add(self, value: float) -> None:
        self._forget()
        self._values.append((self._clock(), value))

    def percentile(self, point: float) -> float | None:
        """The nearest-rank percentile of the window's values; None without values."""
        self._forget()
        values = sorted(value for _, value in self._values)
        return values[max(math.ceil(point / 100 * len(values)) - 1, 0)] if values else None

    def per_second(self) -> float:
        """The sum of the window's values, divided by the window's length, or by the time since start if shorter."""
        self._forget()
        elapsed = min(self._clock() - self._started_s, self._window_s)
        return sum(value for _, value in self._values) / max(elapsed, 1.0)

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while self._values and self._values[0][0] < oldest:
            self._values.popleft()
