"""The replay of sessions: what is found where states are kept."""

import random

import pytest

from loadgen.experiments.micro.points import PAGE, PLACEMENTS, blocks_as_tokens, replay, sessions


@pytest.mark.parametrize("kind", ["agents", "chats", "reasoning"])
def test_no_cache_finds_more_than_one_with_a_state_at_every_token(kind):
    asks = sessions(kind, 4, random.Random(1))
    assert asks == sorted(asks, key=lambda ask: ask.at_s)
    found = {name: replay(asks, name, 20_000, 100) for name in PLACEMENTS}
    most = found["every token"].cached
    # A point keeps the rows of a partial page behind an answer; KV alone is kept in whole pages.
    assert all(one.cached < most + PAGE * len(asks) for one in found.values())
    assert found["ramet"].cached > 0.95 * most
    assert found["every token"].point_pages == 0
    assert found["ramet"].point_pages > 0
    assert (found["one a request"].cached > 0) == (kind != "reasoning")


def test_blocks_of_a_trace_become_tokens():
    first, second = blocks_as_tokens([(0.0, [5, 6, 8]), (1.0, [5, 7, 9])], 3)
    assert (len(first.prompt), first.prompt[:3], second.prompt[:3] == first.prompt[:3]) == (6, first.prompt[:3], True)
    assert not set(first.prompt[3:]) & set(second.prompt)
