"""Percentiles of the latest distances."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.features.reasoning.reservoir import WARM_UP, Reservoir


def test_nothing_is_shared_before_the_warm_up():
    reservoir = Reservoir()
    for i in range(WARM_UP):
        assert reservoir.threshold(80) == -math.inf
        assert reservoir.threshold(100) == math.inf
        reservoir.add(float(i))
    assert reservoir.threshold(80) == pytest.approx(np.percentile(range(WARM_UP), 80))
    assert reservoir.threshold(100) == math.inf


@given(st.lists(st.floats(0, 9), min_size=1, max_size=40), st.floats(0, 99.9), st.integers(1, 12))
def test_percentiles_are_those_of_the_latest(distances, percentile, most):
    reservoir = Reservoir(warm_up=1, most=most)
    for number, distance in enumerate(distances, 1):
        reservoir.add(distance)
        latest = distances[max(number - most, 0) : number]
        assert len(reservoir) == len(latest)
        assert reservoir.threshold(percentile) == pytest.approx(np.percentile(latest, percentile))
