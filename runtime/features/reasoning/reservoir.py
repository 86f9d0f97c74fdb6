"""The latest distances and their percentiles (ReasonCache, section IV-A2)."""

import math
from collections import deque

from sortedcontainers import SortedList

WARM_UP = 256
_MOST = 4096


class Reservoir:
    """The latest distances between pages and their best candidates, over all requests.

    Attributes:
        latest: the distances, oldest first.
    """

    def __init__(self, warm_up: int = WARM_UP, most: int = _MOST):
        """`warm_up`: number of distances before pages are shared; `most`: number of distances that are kept."""
        self._warm_up, self._most = warm_up, most
        self.latest: deque[float] = deque()
        self._sorted: SortedList = SortedList()

    def __len__(self) -> int:
        return len(self.latest)

    def add(self, distance: float) -> None:
        if len(self.latest) == self._most:
            self._sorted.remove(self.latest.popleft())
        self.latest.append(distance)
        self._sorted.add(distance)

    def threshold(self, percentile: float) -> float:
        """The largest distance at which a page is shared, interpolated linearly; -inf during the warm-up.

        Percentile 100 gives infinity, even during the warm-up: then the filters alone decide.
        """
        if percentile >= 100:
            return math.inf
        if len(self.latest) < self._warm_up:
            return -math.inf
        place = percentile / 100 * (len(self._sorted) - 1)
        low = self._sorted[int(place)]
        high = self._sorted[min(int(place) + 1, len(self._sorted) - 1)]
        return float(low + (high - low) * (place - int(place)))
