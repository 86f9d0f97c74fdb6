"""Looks for drafts, without a model."""

from itertools import count

import pytest

from radix import RadixTree
from runtime.features.drafts.drafter import Drafter
from runtime.request import Work
from tests.runtime.requests import make_request


class Room:
    """In place of a lease: memory suffices."""

    def grow(self, ahead):
        return True


@pytest.mark.parametrize(("requests", "pause"), [(1, 0), (7, 0), (8, 1), (16, 2), (32, 4)])
def test_the_more_requests_the_longer_looks_pause_where_nothing_was_found(requests, pause):
    drafter, tokens, looks, steps = Drafter(RadixTree(16)), count(), [], []
    find = drafter._find
    drafter._find = lambda request: looks.append(len(steps)) or find(request)
    running = [
        make_request([next(tokens), next(tokens)], 9999, prompt_len=1, lease=Room(), rid=f"{i}")
        for i in range(requests)
    ]

    def one_step():
        work = []
        for request in running:
            request.sequence.num_computed = len(request.tokens) - 1
            work.append(Work(request, request.sequence.num_computed, 1, 1))
        drafter.extend(work, 256)
        steps.append(work)
        drafter.note_step(work, 1.0 + 0.001 * sum(len(item.draft) for item in work))
        return work

    for _ in range(20):
        assert not any(item.draft for item in one_step())
        for request in running:
            request.tokens.append(next(tokens))
    assert looks == [step for step in range(0, 20, pause + 1) for _ in running]
    for request in running:  # from here on, all say what they have said
        request.tokens.extend(request.tokens[:10])
    for _ in range(20):
        drafted = one_step()
        for item in drafted:
            item.request.tokens.extend(item.request.tokens[-21:][: 1 + len(item.draft)])
    assert {step for step in looks if step >= 20} >= set(range(25, 40)), "while drafts pay, no step is left out"
    assert any(item.draft for item in drafted)
