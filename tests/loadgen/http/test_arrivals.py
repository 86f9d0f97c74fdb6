"""Arrival processes: their rates, their variation, their order."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from loadgen.http.arrivals import Gamma


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


def test_the_same_seed_gives_the_same_instants():
    assert (instants(Gamma(3.0, 0.5), 50, seed=9) == instants(Gamma(3.0, 0.5), 50, seed=9)).all()
    assert (instants(Gamma(3.0, 0.5), 50, seed=9) != instants(Gamma(3.0, 0.5), 50, seed=10)).any()
