"""Arrival processes: their rates, their variation, their order."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import numpy as np
import pytest

from loadgen.http.arrivals import Constant, Gamma, Ramp


def instants(process, count, seed=3):
    return np.array(list(islice(process.times(random.Random(seed)), count)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_the_rate_and_the_variation_that_its_shape_says(burstiness):
    gaps = np.diff(instants(Gamma(20.0, burstiness), 20001))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_poisson_counts_vary_as_much_as_they_are_large():
    at = instants(Gamma(50.0), 50000)
    counts = np.bincount(at.astype(int))[:-1]
    assert counts.mean() == pytest.approx(50, rel=0.05)
    assert counts.var() == pytest.approx(50, rel=0.2)


def test_constant_does_not_drift():
    assert instants(Constant(8.0), 10001)[-1] == pytest.approx(1250)


@pytest.mark.parametrize(("first", "last"), [(5.0, 45.0), (45.0, 5.0), (20.0, 20.0)])
def test_a_ramp_goes_in_a_line_and_then_stays(first, last):
    seconds = 200.0
    at = instants(Ramp(first, last, seconds), 12000)
    assert all(a <= b for a, b in pairwise(at))
    quarters, _ = np.histogram(at, bins=4, range=(0, seconds))
    expected = [(first + (last - first) * (q + 0.5) / 4) * seconds / 4 for q in range(4)]
    assert quarters == pytest.approx(expected, rel=0.1)
    if last > 10:
        after = at[(at > seconds) & (at < at[-1])]
        assert len(after) / (at[-1] - seconds) == pytest.approx(last, rel=0.1)


def test_the_same_seed_gives_the_same_instants():
    assert (instants(Gamma(3.0, 0.5), 50, seed=9) == instants(Gamma(3.0, 0.5), 50, seed=9)).all()
    assert (instants(Gamma(3.0, 0.5), 50, seed=9) != instants(Gamma(3.0, 0.5), 50, seed=10)).any()
