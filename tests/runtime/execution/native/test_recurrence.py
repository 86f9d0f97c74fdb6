"""Recurrent layers in the kernels: transformers' logits, and the same bits wherever a sequence is cut."""

import random

import pytest
import torch

from tests.runtime.execution.mixers.models import HYBRID_MODELS, VOCAB, Runner, check_run_again, oracle, save_hybrid

TEXT = [random.Random(5).randrange(3, VOCAB) for _ in range(70)]


@pytest.fixture(scope="module", params=list(HYBRID_MODELS))
def saved(request, tmp_path_factory):
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def runner(saved, library):
    return Runner(saved, library)


@pytest.fixture(scope="module")
def expected(saved):
    with torch.inference_mode():
        return oracle(saved)(torch.tensor([TEXT]), use_cache=False).logits[0]


def first_layer(runner, slot):
    """The state of the first layer, whose input does not depend on how attention was cut."""
    return [tensor[slot].clone() for tensor in runner.states.tensors[: len(runner.spec.recurrence.states)]]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_logits_are_those_of_transformers_for_every_chunk(runner, expected):
    """Beside another sequence, which does not change them. The states have the same bits."""
    whole = None
    for size in (1, 2, 3, 5, 8, 16, 31, 63, 64, 70):
        one, other = runner.start(1), runner.start(4)
        found = []
        for first in range(0, len(TEXT), size):
            piece = TEXT[first : first + size]
            found.append(runner.step((other, TEXT[first : first + 2]), (one, piece))[-len(piece) :])
        logits = torch.cat(found)
        assert torch.equal(logits.argmax(1), expected.argmax(1)), size
        assert (logits - expected).abs().max() < 1e-3 * expected.std(), size
        whole = whole or first_layer(runner, 1)
        assert same(first_layer(runner, 1), whole), size


def test_a_saved_state_resumes_where_it_was_saved(runner):
    """A branch that begins inside a chunk, and inside a page of KV."""
    one = runner.start(0)
    runner.step((one, TEXT[:40]), saves=[(36, 3), (9, 2)])
    whole = runner.step((one, TEXT[40:50]))
    for slot, length in ((2, 10), (3, 37)):
        branch = runner.start(5)
        runner.states.copy(slot, 5)
        branch.tokens, branch.first_page = TEXT[:length], one.first_page
        found = runner.step((branch, TEXT[length:50]))
        assert torch.allclose(found[-10:], whole, atol=1e-4)
        assert same(first_layer(runner, 5), first_layer(runner, 0))


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_accepted_guesses_are_replayed_and_others_leave_no_trace(runner, accepted):
    one, plain = runner.start(0), runner.start(1)
    runner.step((one, TEXT[:20]))
    wrong = [token + 1 for token in TEXT[21 + accepted : 25]]
    runner.step((one, [*TEXT[20 : 21 + accepted], *wrong]), draft=4)
    one.tokens += TEXT[21 : 21 + accepted]
    one.accepted = accepted
    found = runner.step((one, TEXT[21 + accepted : 30]), saves=[(0, 3)])
    runner.step((plain, TEXT[: 21 + accepted]))
    wanted = runner.step((plain, TEXT[21 + accepted : 30]), saves=[(0, 2)])
    assert torch.allclose(found, wanted, atol=1e-4)
    assert same(first_layer(runner, 0), first_layer(runner, 1))
    assert same(first_layer(runner, 3), first_layer(runner, 2))


@pytest.mark.parametrize("draft", [0, 3])
def test_a_step_with_another_target_can_be_run_again(runner, draft):
    check_run_again(runner, TEXT, draft)


def test_bfloat16_and_one_thread(saved, library):
    runners = [Runner(saved, library, 1, torch.bfloat16), Runner(saved, None, 1, torch.bfloat16)]
    logits = [runner.step((runner.start(2), TEXT)) for runner in runners]
    error = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    assert error.mean() < 0.05
