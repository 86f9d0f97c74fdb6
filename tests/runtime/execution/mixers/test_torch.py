"""Recurrent layers in torch: transformers' logits, and the same bits wherever a sequence is cut."""

import random

import pytest
import torch

from tests.runtime.execution.mixers.models import HYBRID_MODELS, VOCAB, Runner, check_run_again, oracle, save_hybrid

TEXT = [random.Random(5).randrange(3, VOCAB) for _ in range(70)]


@pytest.fixture(scope="module", params=list(HYBRID_MODELS))
def saved(request, tmp_path_factory):
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def runner(saved):
    return Runner(saved)


@pytest.fixture(scope="module")
def expected(saved):
    with torch.inference_mode():
        return oracle(saved)(torch.tensor([TEXT]), use_cache=False).logits[0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 63, 64, 70])
def test_logits_are_those_of_transformers_for_any_chunk(runner, expected, size):
    """Beside another sequence, which does not change them."""
    one, other = runner.start(1), runner.start(4)
    found = []
    for first in range(0, len(TEXT), size):
        piece = TEXT[first : first + size]
        found.append(runner.step((other, TEXT[first : first + 2]), (one, piece))[-len(piece) :])
    logits = torch.cat(found)
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    assert (logits - expected).abs().max() < 1e-3 * expected.std()


def test_a_sequence_cut_anywhere_has_the_same_state(runner):
    """The mixers read the same rows, because the products in torch depend on the number of rows."""
    mixers = [layer.mixer for layer in runner.model.layers if hasattr(layer.mixer, "advance")]
    torch.manual_seed(2)
    for mixer in mixers[:2]:
        rows = torch.randn(40, mixer.spec.record)
        whole = [torch.zeros(shape) for shape in mixer.spec.states]
        wanted = mixer.advance(rows, whole)
        for cut in range(1, 40):
            parts = [torch.zeros(shape) for shape in mixer.spec.states]
            found = torch.cat((mixer.advance(rows[:cut], parts), mixer.advance(rows[cut:], parts)))
            assert torch.equal(found, wanted)
            assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


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
        assert torch.equal(found[-10:].argmax(1), whole.argmax(1))


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_accepted_guesses_are_replayed_and_others_leave_no_trace(runner, accepted):
    one, plain = runner.start(0), runner.start(1)
    runner.step((one, TEXT[:20]))
    wrong = [token + 1 for token in TEXT[21 + accepted : 25]]
    guessed = runner.step((one, [*TEXT[20 : 21 + accepted], *wrong]), draft=4)
    one.tokens += TEXT[21 : 21 + accepted]
    one.accepted = accepted
    found = runner.step((one, TEXT[21 + accepted : 30]))
    runner.step((plain, TEXT[: 21 + accepted]))
    wanted = runner.step((plain, TEXT[21 + accepted : 30]))
    assert torch.allclose(found, wanted, atol=1e-4)
    for tensor in runner.states.tensors:
        assert torch.allclose(tensor[0], tensor[1], atol=1e-4)
    assert guessed.shape[0] == 5


@pytest.mark.parametrize("draft", [0, 3])
def test_a_step_with_another_target_can_be_run_again(runner, draft):
    check_run_again(runner, TEXT, draft)
