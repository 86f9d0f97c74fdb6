"""The number of drafted rows of a step: measured times and rates decide."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.sampling.drafts.pace import Acceptance, Pace, share_out

chances = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3).map(lambda found: sorted(found, reverse=True))


@given(st.lists(chances, min_size=1, max_size=3), st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 2))
def test_no_other_share_gives_more_tokens_a_second(drafts, slopes, others):
    seconds = 1 + np.concatenate(([0.0], np.cumsum(slopes)))
    requests = len(drafts) + others

    def rate(lengths):
        gained = sum(sum(draft[:n]) for draft, n in zip(drafts, lengths, strict=True))
        return (requests + gained) / seconds[sum(lengths)]

    every = product(*(range(len(draft) + 1) for draft in drafts))
    best = max(rate(lengths) for lengths in every if sum(lengths) < len(seconds))
    found = share_out([np.array(draft) for draft in drafts], requests, seconds)
    assert sum(found) < len(seconds)
    assert rate(found) == pytest.approx(best)


def test_times_of_steps_grow_with_their_rows_and_go_on_where_nothing_was_measured():
    pace = Pace()
    pace.note(1, 3, 1.5)
    assert pace.seconds(1, 4) is None, "it is not known what a step without drafts costs"
    pace.note(1, 0, 1.0)
    assert pace.seconds(1, 4).tolist() == pytest.approx([1, 1 + 0.5 / 3, 1 + 1 / 3, 1.5, 1.5 + 0.5 / 3])
    assert pace.seconds(2, 4) is None
    for _ in range(50):
        pace.note(1, 3, 0.5)
    assert pace.seconds(1, 3).tolist() == pytest.approx([1, 1, 1, 1], rel=1e-3), "more rows are not believed cheaper"
    pace.note(1, 20, 2.0)
    assert pace.seconds(1, 24)[24] == pytest.approx(2.0)
    assert pace.seconds(1, 26)[26] > 2.0


def test_beside_prompts_rows_cost_what_theirs_do_on_top_of_a_step_that_decodes():
    pace = Pace()
    pace.note(2, 0, 1.0)
    assert pace.seconds(2, 3, beside=10) is None, "it is not known what rows cost there"
    pace.note(2, 3, 3.0, beside=10)
    assert pace.seconds(2, 3, beside=10).tolist() == pytest.approx([1.0, 1.2, 1.4, 1.6])
    assert pace.seconds(3, 3, beside=10) is None
    assert pace.seconds(2, 0).tolist() == [1.0]


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
