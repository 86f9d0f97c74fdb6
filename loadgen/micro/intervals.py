"""Intervals of what was measured several times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_DRAWS = 2000


def interval(
    values: np.ndarray, rng: np.random.Generator, statistic: Callable[..., np.ndarray] = np.mean
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean, or of another statistic that takes an axis."""
    drawn = statistic(values[rng.integers(len(values), size=(_DRAWS, len(values)))], axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)
