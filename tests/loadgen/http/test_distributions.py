"""Distributions as they are written, the numbers they give, and arrival processes."""

import random
import re
from itertools import islice

import numpy as np
import pytest

from loadgen.http.arrivals import Gamma
from loadgen.http.lengths import Distribution


def drawn(text, count=20000):
    rng = random.Random(4)
    distribution = Distribution.parse(text)
    return np.array([distribution.draw(rng) for _ in range(count)])


def test_mean_and_deviation_are_those_of_the_numbers():
    assert set(drawn("64", 10)) == {64.0}
    assert drawn("uniform:10:30").mean() == pytest.approx(20, rel=0.02)
    for kind in ("normal", "lognormal"):
        values = drawn(f"{kind}:200:40")
        assert values.mean() == pytest.approx(200, rel=0.02)
        assert values.std() == pytest.approx(40, rel=0.05)
    assert np.log(drawn("lognormal:200:150")).std() == pytest.approx(np.sqrt(np.log1p((150 / 200) ** 2)), rel=0.05)


def test_bounds_hold_and_a_count_is_at_least_one():
    values = drawn("normal:50:100:20:80")
    assert values.min() == 20
    assert values.max() == 80
    assert drawn("normal:1:5").min() == 0
    assert Distribution.parse("0").count(random.Random(1)) == 1


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "nan", "inf", "uniform:5", "uniform:9:3", "normal:1:2:3", "lognormal:0:1", "zipf:1:2", "1:2"],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Distribution.parse(text)


@pytest.mark.parametrize("text", ["64", "uniform:10:30", "lognormal:64:32:8:512"])
def test_it_is_written_as_it_was_read(text):
    assert str(Distribution.parse(text)) == text


def instants(process, count, seed=3):
    return np.array(list(islice(process.times(random.Random(seed)), count)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_the_rate_and_the_variation_that_its_shape_says(burstiness):
    gaps = np.diff(instants(Gamma(20.0, burstiness), 20001))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_the_same_seed_gives_the_same_instants():
    assert (instants(Gamma(3.0, 0.5), 50, seed=9) == instants(Gamma(3.0, 0.5), 50, seed=9)).all()
    assert (instants(Gamma(3.0, 0.5), 50, seed=9) != instants(Gamma(3.0, 0.5), 50, seed=10)).any()
