"""How much of something there is per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Rate:
    """How much of something there was per second lately."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic):
        self._window_s = window_s
        self._clock = clock
        self._started_s = clock()
        self._seconds: deque[tuple[int, int]] = deque()

    def add(self, amount: int) -> None:
        """Count something that happened now."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))
        self._forget()

    def per_second(self) -> float:
        """The mean over the window, or over the time since start while that is shorter."""
        self._forget()
        elapsed = min(self._clock() - self._started_s, self._window_s)
        return sum(amount for _, amount in self._seconds) / max(elapsed, 1.0)

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while self._seconds and self._seconds[0][0] < oldest:
            self._seconds.popleft()
