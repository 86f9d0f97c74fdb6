"""Statistics of repeated measurements, with bootstrap intervals."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

StatisticName = Literal["median", "mean", "p90", "p99", "max", "min", "sum"]
STATISTICS: dict[StatisticName, Callable[..., Any]] = {
    "median": np.median,
    "mean": np.mean,
    "p90": lambda values, axis=None: np.percentile(values, 90, axis=axis),
    "p99": lambda values, axis=None: np.percentile(values, 99, axis=axis),
    "max": np.max,
    "min": np.min,
    "sum": np.sum,
}
Estimate = tuple[float, float, float]  # a statistic and the ends of its 95 % interval

_RESAMPLES = 2000


def estimate(values: Sequence[float] | np.ndarray, statistic: StatisticName = "median") -> Estimate:
    """The statistic and its 95 % bootstrap interval; the interval of one value, and of equal ones, is empty."""
    array = np.asarray(values, dtype=float)
    function = STATISTICS[statistic]
    middle = float(function(array))
    if len(array) < 2 or np.ptp(array) == 0:
        return middle, middle, middle
    resampled = array[np.random.default_rng(0).integers(len(array), size=(_RESAMPLES, len(array)))]
    low, high = np.percentile(function(resampled, axis=1), (2.5, 97.5))
    return middle, float(low), float(high)


def over_repeats(repeats: Sequence[Sequence[float]], statistic: StatisticName) -> Estimate | None:
    """The statistic of samples in repeats.

    With several repeats, it is the median (for means: the mean) of their statistics, and repeats are resampled, because
    samples of one repeat are not independent. With a single repeat, its samples are resampled.
    """
    known = [values for values in repeats if len(values)]
    if not known:
        return None
    if len(known) == 1:
        return estimate(known[0], statistic)
    return estimate(each(known, statistic), "mean" if statistic in ("mean", "sum") else "median")


def each(repeats: Sequence[Sequence[float]], statistic: StatisticName) -> list[float]:
    """The statistic of every repeat."""
    return [float(STATISTICS[statistic](np.asarray(values, dtype=float))) for values in repeats]


def compared(
    mine: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
    statistic: StatisticName,
    how: Literal["ratio", "difference"],
) -> Estimate | None:
    """A paired comparison with a base: by the statistics of common repeats, or the samples of a single repeat."""
    pairs = [(ours, theirs) for ours, theirs in zip(mine, base, strict=True) if len(ours) and len(theirs)]
    if not pairs:
        return None
    if len(pairs) == 1 and statistic == "mean" and how == "difference" and len(pairs[0][0]) == len(pairs[0][1]):
        return estimate(np.subtract(*pairs[0]), "mean")
    ours, theirs = (np.array(each([pair[side] for pair in pairs], statistic)) for side in (0, 1))
    if how == "ratio" and not theirs.all():
        return None
    return estimate(ours / theirs if how == "ratio" else ours - theirs, "mean" if statistic == "mean" else "median")


def shown(found: Estimate | None, form: str = ".1f", factor: float = 1.0, interval: bool = True) -> str:
    """An estimate as text: `12.3 [11.0, 14.2]`, without an empty interval."""
    if found is None:
        return ""
    middle, low, high = (f"{value * factor:{form}}" for value in found)
    return f"{middle} [{low}, {high}]" if interval and found[1] != found[2] else middle
