"""The choice of tokens by the kernels and by torch, against its definition in float64."""

import math

import numpy as np
import pytest
import torch

from runtime.execution.native.choosing import NativeChoosing
from runtime.execution.native.library import ISAS, load
from runtime.execution.native.packed import Team
from runtime.params import SamplingParams
from runtime.sampler_state import NO_TOKEN, Choosing, Seen, TokenChoice
from runtime.sampling.choosing import TorchChoosing


@pytest.fixture(params=[*ISAS, "torch"], scope="module")
def choosing(request) -> Choosing:
    if request.param == "torch":
        return TorchChoosing()
    if (library := load(request.param)) is None:
        pytest.skip(f"the native kernels for {request.param} were not built, or this processor cannot run them")
    return NativeChoosing(Team(library, 2), TorchChoosing().argmax)


KINDS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 700, "top_p": 0.8},
    {"top_p": 0.05},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1e-4, "top_p": 0.9},
    {"min_p": 0.3, "top_k": 50, "top_p": 0.9},
    {"logit_bias": {0: 3.5, 11: -100.0}},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": -1.5},
    {"temperature": 0, "repetition_penalty": 0.5, "frequency_penalty": -2},
]


def kept(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Weights, float64 [vocab], 0 for dropped tokens."""
    weights = np.exp((logits - logits.max()) / p.divisor)
    if 0 < p.top_k < len(weights):
        weights[np.argsort(-logits, kind="stable")[p.top_k :]] = 0
    if p.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        weights[order[weights[order].cumsum() - weights[order] >= p.top_p * weights.sum()]] = 0
    weights[weights < p.min_p * weights.max()] = 0
    return weights


def splitmix(stream: int, count: int) -> np.ndarray:
    """Exponential noise of a stream (Steele et al., 2014), float64 [count]."""
    word, found = (1 << 64) - 1, []
    for _ in range(count):
        stream = stream + 0x9E3779B97F4A7C15 & word
        z = (stream ^ stream >> 30) * 0xBF58476D1CE4E5B9 & word
        z = (z ^ z >> 27) * 0x94D049BB133111EB & word
        found.append(-math.log1p(-((z ^ z >> 31) >> 12) * 2.0**-52 - 2.0**-53))
    return np.array(found)


def defined(row: torch.Tensor, choice: TokenChoice) -> int:
    """The token of a row."""
    logits, p = row.double().numpy().copy(), choice.params
    for token, bias in p.logit_bias.items():
        logits[token] += bias
    if choice.seen is not None:
        counts = choice.seen.counts.numpy()
        scaled = np.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
        logits = np.where(counts > 0, scaled, logits)
        generated = np.maximum(counts - 1, 0)
        logits -= p.frequency_penalty * generated + p.presence_penalty * (generated > 0)
    if choice.allowed is not None:
        logits[np.unpackbits(choice.allowed, bitorder="little")[: len(logits)] == 0] = -np.inf
    logits[choice.barred] = -np.inf
    if choice.stream is None:
        return int(logits.argmax())
    weights = kept(logits, p)
    blocks = np.pad(weights, (0, -len(weights) % 64)).reshape(-1, 64)
    noise = splitmix(choice.stream, len(blocks) + 64)
    block = int((blocks.sum(1) / noise[: len(blocks)]).argmax())
    return block * 64 + int((blocks[block] / noise[len(blocks) :]).argmax())


def choices(vocab: int, seed: int, **more) -> list[TokenChoice]:
    """One of each kind, without and with a mask."""
    draw, found = torch.Generator().manual_seed(seed), []
    for kind in (kind for kind in KINDS if max(kind.get("logit_bias", [0])) < vocab):
        for masked in (False, True):
            given = {"temperature": 0.8} | kind | more
            params = SamplingParams(**given)
            one = TokenChoice(len(found), params)
            if not params.greedy:
                one.stream = int(torch.randint(0, 1 << 62, (), generator=draw))
            if params.penalised:
                counts = torch.randint(0, 4, (vocab,), generator=draw)
                one.seen = Seen(counts.numpy(), counts)
            if masked:
                one.allowed = torch.randint(0, 256, (-(-vocab // 32) * 4,), generator=draw).to(torch.uint8).numpy()
                one.allowed[0] |= 1
                one.barred = [vocab - 1] if vocab > 1 else []
            found.append(one)
    return found


@pytest.mark.parametrize("vocab", [1, 63, 65, 1000, 49157])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_tokens_are_those_of_the_definition(choosing, vocab, spread):
    asked = choices(vocab, vocab)
    rows = spread * torch.randn(len(asked), vocab, generator=torch.Generator().manual_seed(vocab))
    untouched = rows.clone()
    found = choosing.choose(rows, asked)
    assert found.tolist() == [defined(row, one) for row, one in zip(rows, asked, strict=True)]
    assert torch.equal(rows, untouched)
    assert [choosing.choose(rows, [one]).item() for one in asked] == found.tolist()


@pytest.mark.parametrize("kind", [{"top_p": 0.7}, {"top_p": 0.3}, {"top_k": 300}, {"top_k": 3000, "min_p": 0.4}])
def test_of_equal_tokens_the_lower_ids_stay(choosing, kind):
    if "top_k" in kind and isinstance(choosing, TorchChoosing):
        pytest.skip("torch's top-k keeps any of equal tokens")
    rows = torch.randn(30, 4000, generator=torch.Generator().manual_seed(1)).mul(2).round() / 2
    asked = [TokenChoice(i, SamplingParams(**kind), 7 * i) for i in range(30)]
    assert choosing.choose(rows, asked).tolist() == [defined(rows[one.row], one) for one in asked]


def test_rows_without_a_choice_give_no_token(choosing):
    rows = torch.zeros(5, 100)
    rows[1], rows[2, 7], rows[3, 9] = -torch.inf, torch.inf, torch.nan
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(top_p=0.5)
    for params, given in (greedy, None), (drawn, 5):
        asked = [TokenChoice(i, params, given) for i in range(5)]
        asked[3].barred = [9]
        asked[4].barred = list(range(100))
        assert choosing.choose(rows, asked).tolist()[1:] == [NO_TOKEN] * 4


def test_no_token_without_weight_is_drawn_and_none_behind_the_last(choosing):
    rows = torch.full((1, 70), -torch.inf)
    rows[0, 66] = 1.0
    asked = [
        TokenChoice(0, SamplingParams(**kind), i) for kind in ({}, {"top_p": 0.5}, {"top_k": 3}) for i in range(99)
    ]
    assert set(choosing.choose(rows, asked).tolist()) == {66}


@pytest.mark.parametrize("vocab", [1, 64, 1000, 49157])
@pytest.mark.parametrize("top", [0, 1, 20, 2000])
def test_log_probabilities(choosing, vocab, top):
    rows = 4 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    rows[1] *= 100  # most weights are too small for float32
    rows[2] = rows[2].round()
    rows[3, vocab // 2 :] = -torch.inf
    rows[3, 0] = 0
    tokens, index = torch.tensor([0, vocab // 2, 0, vocab - 1]), [5, 1, 2, 3]
    chosen, ids, values = choosing.measure(rows, index, tokens, top)
    wanted = rows.double().log_softmax(-1)[index]
    # Torch for ARM sums the weights of a large vocabulary in float32, one after another: it is off by some 1e-5.
    near = {"rtol": 2e-6, "atol": 5e-5 if isinstance(choosing, TorchChoosing) else 1e-5}
    assert torch.allclose(chosen.double(), wanted.gather(1, tokens[:, None])[:, 0], **near)
    assert ids.shape == values.shape == (4, min(top, vocab))
    order = rows[index].sort(descending=True, stable=True).indices[:, :top]
    assert torch.allclose(values.double(), wanted.gather(1, order), **near)
    if isinstance(choosing, TorchChoosing):  # whose order of equal tokens is any
        assert torch.equal(rows[index].gather(1, ids), rows[index].gather(1, order))
    else:
        assert torch.equal(ids, order)


def test_measured_rows_that_are_no_numbers_are_left_alone(choosing):
    rows = torch.full((2, 100), math.nan)
    rows[1] = 0
    chosen, _, values = choosing.measure(rows, [0, 1], torch.tensor([0, 3]), 2)
    assert [chosen[1].item(), *values[1].tolist()] == pytest.approx([-math.log(100)] * 3)
