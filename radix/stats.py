"""Counters and histograms of a tree; they only grow."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal["room", "quota", "flush"]

_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0)


@dataclass(slots=True)
class Histogram:
    """Counts of values by bucket. They are not cumulative, unlike the buckets of Prometheus.

    Attributes:
        bounds: upper bounds in seconds; one more bucket takes the values above the last.
        counts: number of values in each bucket.
        total: sum of all values, in seconds.
    """

    bounds: tuple[int | float, ...] = _SECONDS
    counts: list[int] = field(default_factory=list)
    total: int | float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class Stats:
    """Counters of evicted pages, and histograms of times.

    Attributes:
        evicted: number of pages by cause: `room` was needed, the tenant was over its `quota`, or a `flush`.
        idle_s: seconds from the last use of each evicted page to its eviction.
        lifetime_s: seconds from the insertion of each evicted page to its eviction.
        reuse_gap_s: seconds since the previous use, for each use of a path.
    """

    evicted: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(("room", "quota", "flush"), 0))
    idle_s: Histogram = field(default_factory=Histogram)
    lifetime_s: Histogram = field(default_factory=Histogram)
    reuse_gap_s: Histogram = field(default_factory=Histogram)
