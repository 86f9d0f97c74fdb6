"""Recurrent layers: transformers' logits, and the same state wherever a sequence is cut; in the kernels, to the bit."""

import random
from itertools import accumulate

import pytest
import torch

from runtime.execution.native.library import ISAS, load
from tests.runtime.execution.mixers.models import HYBRID_MODELS, VOCAB, Runner, oracle, save_hybrid

TEXT = [random.Random(5).randrange(3, VOCAB) for _ in range(70)]


@pytest.fixture(scope="module", params=list(HYBRID_MODELS))
def saved(request, tmp_path_factory):
    return save_hybrid(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["torch", "chunks", *ISAS])
def code(request):
    """torch, its form for GPUs (`StatePlan`), and every library that can be run here."""
    return request.param


@pytest.fixture(scope="module")
def library(code):
    """None for torch."""
    library = load(code) if code in ISAS else None
    if library is None and code in ISAS:
        pytest.skip(f"the native kernels for {code} were not built, or this processor cannot run them")
    return library


@pytest.fixture(scope="module")
def runner(saved, code, library):
    runner = Runner(saved, library)
    runner.model.is_chunked = code == "chunks"
    return runner


@pytest.fixture(scope="module")
def expected(saved):
    with torch.inference_mode():
        return oracle(saved)(torch.tensor([TEXT]), use_cache=False).logits[0]


@pytest.fixture
def same(runner, library):
    """Whether two slots have the same state: of the first layer the same bits, as its input depends on no cut.

    In torch only nearly, because its products depend on the number of rows.
    """

    def same(one, other):
        if library is None:
            return all(torch.allclose(tensor[one], tensor[other], atol=1e-4) for tensor in runner.states.tensors)
        first = runner.states.tensors[: len(runner.spec.recurrence.states)]
        return all(torch.equal(tensor[one], tensor[other]) for tensor in first)

    return same


def test_logits_are_those_of_transformers_for_every_chunk(runner, expected, same):
    """Beside another sequence, which does not change them."""
    whole = runner.start(0)
    runner.step((whole, TEXT))
    for sizes in ([*[1] * 20, 50], [1, 2, 3, 5, 8, 16, 31, 4], [31, 16, 8, 5, 3, 2, 5], [63, 7], [64, 6], [70]):
        one, other, found = runner.start(1), runner.start(4), []
        for size, stop in zip(sizes, accumulate(sizes), strict=True):
            piece = TEXT[stop - size : stop]
            found.append(runner.step((other, piece[:2]), (one, piece))[-size:])
        logits = torch.cat(found)
        assert torch.equal(logits.argmax(1), expected.argmax(1)), sizes
        assert (logits - expected).abs().max() < 1e-3 * expected.std(), sizes
        assert same(0, 1), sizes


def test_a_mixer_in_torch_has_the_same_state_wherever_its_rows_are_cut(saved):
    """Given the same rows."""
    mixers = [layer.mixer for layer in Runner(saved).model.layers if hasattr(layer.mixer, "advance")]
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


def test_a_saved_state_resumes_where_it_was_saved(runner, same):
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
        assert same(5, 0)


@pytest.mark.parametrize("accepted", [0, 1, 4])
def test_accepted_guesses_are_replayed_and_others_leave_no_trace(runner, same, accepted):
    one, plain = runner.start(0), runner.start(1)
    runner.step((one, TEXT[:20]))
    wrong = [token + 1 for token in TEXT[21 + accepted : 25]]
    guessed = runner.step((one, [*TEXT[20 : 21 + accepted], *wrong]), draft=4)
    assert guessed.shape[0] == 5
    one.tokens += TEXT[21 : 21 + accepted]
    one.accepted = accepted
    found = runner.step((one, TEXT[21 + accepted : 30]), saves=[(0, 3)])
    runner.step((plain, TEXT[: 21 + accepted]))
    wanted = runner.step((plain, TEXT[21 + accepted : 30]), saves=[(0, 2)])
    assert torch.allclose(found, wanted, atol=1e-4)
    assert same(0, 1)
    assert same(3, 2)


@pytest.mark.parametrize("draft", [0, 3])
def test_a_step_with_another_target_can_be_run_again(runner, draft):
    """It leaves its sequence's slot, and the records there, as they were."""
    one, plain = runner.start(0), runner.start(1)
    for sequence in (one, plain):
        runner.step((sequence, TEXT[:24]), draft=4)
        sequence.tokens += TEXT[20:22]
        sequence.accepted = 2
    runner.step((one, TEXT[40:50]), draft=draft, target=2)
    del one.tokens[22:]
    one.slot, one.accepted = 0, 2
    found = runner.step((one, TEXT[22:30]), target=2)
    wanted = runner.step((plain, TEXT[22:30]))
    assert torch.allclose(found, wanted, atol=1e-4)
    assert one.slot == 2
    for tensor in runner.states.tensors:
        assert torch.allclose(tensor[2], tensor[1], atol=1e-4)


def test_bfloat16_and_one_thread(saved, library):
    if library is None:
        pytest.skip("torch is what the kernels are compared with")
    runners = [Runner(saved, library, 1, torch.bfloat16), Runner(saved, None, 1, torch.bfloat16)]
    logits = [runner.step((runner.start(2), TEXT)) for runner in runners]
    error = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    assert error.mean() < 0.05
