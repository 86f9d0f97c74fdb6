"""Intervals of what was measured several times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

_DRAWS = 2000
# Of the normal distribution, for 95 %.
_Z = 1.959964


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % score interval of a share, of which `hits` of `total` were seen (Wilson, 1927)."""
    share, part = hits / total, _Z**2 / total
    middle, half = share + part / 2, _Z * math.sqrt(share * (1 - share) / total + part / (4 * total))
    return (middle - half) / (1 + part), (middle + half) / (1 + part)


def interval(
    values: np.ndarray, rng: np.random.Generator, statistic: Callable[..., np.ndarray] = np.mean
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean, or of another statistic that takes an axis."""
    drawn = statistic(values[rng.integers(len(values), size=(_DRAWS, len(values)))], axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def centred(
    samples: Sequence[np.ndarray], statistic: Callable[..., np.ndarray] = np.mean
) -> tuple[np.ndarray, np.ndarray]:
    """The statistic of each sample, float [n], and its distances [2, n] from the ends of its interval, for plots."""
    bounds = np.array([interval(values, np.random.default_rng(0), statistic) for values in samples]).T
    middle = np.array([statistic(values) for values in samples])
    return middle, np.abs(bounds - middle)


def shown(
    values: np.ndarray,
    form: str,
    statistic: Callable[..., np.ndarray] = np.mean,
    rng: np.random.Generator | None = None,
) -> str:
    """The statistic and its interval as text; without an interval where there is one value."""
    middle = f"{float(statistic(values)):{form}}"
    if len(values) == 1:
        return middle
    low, high = interval(values, rng or np.random.default_rng(0), statistic)
    return f"{middle} [{low:{form}}, {high:{form}}]"
