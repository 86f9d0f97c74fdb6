"""The number of drafted rows of a step: measured times and rates decide."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.features.drafts.pace import LEAST_GAIN, Acceptance, Pace, share_out

drafts_of = st.lists(st.tuples(st.floats(0.3, 0.95), st.integers(1, 3)), min_size=1, max_size=3)


def expected(rate, length):
    """Tokens of a request with a draft."""
    return sum(rate**n for n in range(length + 1))


@given(drafts_of, st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 2))
def test_no_other_share_has_a_higher_mean_of_tokens_a_second(drafts, slopes, others):
    seconds = [1.0]
    for slope in slopes:
        seconds.append(seconds[-1] + slope)
    requests = len(drafts) + others

    def gain(lengths):
        product = math.prod(expected(rate, n) for (rate, _), n in zip(drafts, lengths, strict=True))
        return product ** (1 / requests) / seconds[sum(lengths)]

    every = product(*(range(longest + 1) for _, longest in drafts))
    best = max(gain(lengths) for lengths in every if sum(lengths) < len(seconds))
    lengths, found = share_out(drafts, requests, seconds)
    assert found == pytest.approx(gain(lengths))
    assert found == pytest.approx(best)


def test_one_of_many_requests_does_not_make_a_step_long_for_all():
    seconds = [1 + 0.03 * rows for rows in range(33)]
    assert share_out([(0.95, 32)], 1, seconds)[0] == [26]
    assert share_out([(0.95, 32)], 8, seconds)[0] == [3]
    assert share_out([(0.95, 32)] * 8, 8, seconds + [9.0] * 32)[0] == [4] * 8


def gain_of(requests, cost, rate, delay, steps=1000):
    """Tokens a second with drafts over those without, and the best there could be.

    Args:
        cost: of a step with so many drafted rows; 1 without.
        delay: by number of the step and of those with drafts before it, what the step takes of its time.
    """
    pace, seconds, plain, tokens, drafting = Pace(), 0.0, 0.0, 0.0, 0
    for number in range(steps):
        lengths = [0] * requests
        if (known := pace.seconds(requests, 128)) is not None:
            wanted, gain = share_out([(rate, 32)] * requests, requests, known)
            if gain >= LEAST_GAIN and not pace.due(requests, gain):
                lengths = wanted
        factor = delay(number, drafting if sum(lengths) else None)
        took = factor * cost(sum(lengths))
        drafting += any(lengths)
        pace.note(requests, sum(lengths), took)
        seconds, plain = seconds + took, plain + factor
        tokens += sum(expected(rate, n) for n in lengths)
    _, best = share_out([(rate, 32)] * requests, requests, [cost(rows) for rows in range(129)])
    return tokens / requests / steps * plain / seconds, best


@pytest.mark.parametrize("requests", [1, 32])
@pytest.mark.parametrize("cost", [0.002, 0.05, 0.2])
@pytest.mark.parametrize("rate", [0.05, 0.6, 0.95])
def test_drafts_pay_or_are_left_out_though_steps_are_delayed(requests, cost, rate):
    """The decisions of 1,000 steps whose rows cost a share of a step, where any step may take three times as long."""
    gain, best = gain_of(
        requests, lambda rows: 1 + cost * rows, rate, lambda number, _: 3 if number < 2 or number % 7 == 3 else 1
    )
    assert gain > max(0.98, 1 + 0.9 * (best - 1) - 0.05)


@pytest.mark.parametrize(("requests", "price", "plan"), [(1, 0.015, 0.05), (8, 0.034, 0.1), (32, 0.0205, 0.02)])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.97])
@pytest.mark.parametrize("slow", [{0}, {0, 1, 3, 4}])
def test_slow_first_steps_with_drafts_do_not_end_them(requests, price, plan, rate, slow):
    """Prices are of a CPU, on which the first steps of some shapes take twice their time."""
    gain, best = gain_of(
        requests,
        lambda rows: 1 + (plan + price * rows if rows else 0),
        rate,
        lambda _, drafting: 1 + (drafting in slow),
    )
    assert gain > max(0.99, 1 + 0.9 * (best - 1) - 0.01)


def test_times_of_steps_grow_with_their_rows_and_go_on_where_nothing_was_measured():
    pace = Pace()

    def note(drafted, *times):
        for took in times:
            pace.note(1, drafted, took)

    for _ in range(4):
        assert pace.seconds(1, 4) is None, "it is not known what a step without drafts costs"
        note(0, 1.0)
    hoped = [1, 1.03, 1.03, 1.03, 1.03, 1.03, 1.03, 1.035, 1.04]
    assert pace.seconds(1, 64) == pytest.approx(hoped)
    note(3, 1.5, 9.0)
    assert pace.seconds(1, 64) == pytest.approx(hoped), "twice says nothing"
    note(3, 1.6)
    assert pace.seconds(1, 4) == pytest.approx([1, 1 + 0.5 / 3, 1 + 1 / 3, 1.5, 1.5 + 0.25 / 3])
    assert pace.seconds(1, 2) == pytest.approx([1, 1 + 0.5 / 3, 1 + 1 / 3])
    assert len(pace.seconds(1, 64)) == 13
    assert pace.seconds(2, 4) is None
    note(3, 0.5)
    assert pace.seconds(1, 3) == pytest.approx([0.5, 0.515, 0.515, 0.515]), "fewer rows do not take longer"
    note(20, 2.0, 2.0, 2.0)
    assert pace.seconds(1, 24)[20] == pytest.approx(2.0)
    assert pace.seconds(1, 26)[26] > 2.0
    note(3, *[0.5] * 200)
    assert pace.seconds(1, 24)[12] == pytest.approx(0.5225), "that was long ago"
    note(20, 3.0)
    assert pace.seconds(1, 24)[20] == pytest.approx(2.0), "one more shows that it is still so"


def test_a_step_without_drafts_counts_behind_another_one():
    pace = Pace()
    for _ in range(20):
        for drafted in (0, 2):
            pace.note(4, drafted, 1.0)
    assert pace.seconds(4, 1) is None, "none came behind one of its kind"
    for _ in range(4):
        pace.note(4, 0, 1.0)
    assert pace.seconds(4, 1)[0] == 1.0


def test_requests_and_drafted_rows_cost_the_same_in_batches_of_about_one_size():
    pace = Pace()
    for _ in range(4):
        pace.note(28, 0, 1.0)
    assert pace.seconds(32, 8)[::8] == pytest.approx([1.02, 1.02 * 1.03]), "hoped, as nothing else is known"
    for _ in range(3):
        pace.note(28, 12, 1.6)
    assert pace.seconds(28, 2) == pytest.approx([1.0, 1.05, 1.1])
    assert pace.seconds(32, 8) == pytest.approx([1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 1.5, 1.55, 1.6])
    assert pace.seconds(26, 2) == pytest.approx([26 / 28, 27 / 28, 1.0], abs=0.01)
    assert pace.seconds(16, 2) is None, "far fewer requests"


def test_steps_without_drafts_are_measured_again_the_sooner_the_less_drafts_gain():
    pace = Pace()
    for _ in range(4):
        pace.note(1, 0, 1.0)

    def steps_until_due(gain):
        steps = 0
        while not pace.due(1, gain):
            pace.note(1, 2, 1.0)
            steps += 1
        assert pace.due(1, gain), "until one was measured"
        for _ in range(2):
            pace.note(1, 0, 1.0)
        return steps

    assert [steps_until_due(gain) for gain in (1.01, 1.25, 8.0)] == [8, 32, 128]


def test_beside_prompts_rows_cost_what_theirs_do_on_top_of_a_step_that_decodes():
    pace = Pace()
    for _ in range(4):
        pace.note(2, 0, 1.0)
    assert pace.seconds(2, 3, beside=10) is None, "it is not known what rows cost there"
    pace.note(2, 3, 3.0, beside=10)
    assert pace.seconds(2, 3, beside=10) == pytest.approx([1.0, 1.2, 1.4, 1.6])
    for _ in range(3):
        pace.note(2, 1, 1.5)
    assert pace.seconds(2, 1, beside=10) == [1.0, 1.5], "a row is not cheaper there than where all decode"
    assert pace.seconds(3, 3, beside=10) is None
    assert pace.seconds(2, 0) == [1.0]


def test_a_rate_follows_what_was_tried_here_and_elsewhere():
    everybody = Acceptance()
    mine, other = Acceptance(everybody, memory=16), Acceptance(everybody, memory=16)
    assert mine.rate == other.rate == 0.5
    for _ in range(30):
        mine.note(8, 8)
    assert mine.rate > 0.95
    assert 0.9 < other.rate < mine.rate
    for _ in range(30):
        mine.note(0, 8)
    assert mine.rate < 0.3, "the latest trials count most"
    before = everybody.rate
    other.note(3, 8)
    assert everybody.rate < before, "one of four was wrong; those behind it say nothing"
