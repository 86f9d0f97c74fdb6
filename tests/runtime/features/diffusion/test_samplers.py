"""Samplers against what was published, on real logits of a small model."""

import numpy as np
import pytest
import torch

from runtime.errors import InvalidRequest
from runtime.features.diffusion.ask import DiffusionParams
from runtime.features.diffusion.canvas import BidirectionalCanvas, restrict
from runtime.features.diffusion.fast_dllm import by_factor, by_threshold
from runtime.features.diffusion.published import DiffusionSpec
from runtime.params import SamplingParams
from tests.runtime.features.diffusion.bicache.models import MASK, VOCAB, save_tiny
from tests.runtime.features.diffusion.bicache.reference import PlainModel, dream, llada

PROMPT = [5, 17, 200, 33, 8, 120, 61]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return {kind: PlainModel(save_tiny(kind, tmp_path_factory.mktemp(kind) / kind)) for kind in ("llada", "dream")}


def denoiser(algorithm="low_confidence", seed=0, sampling=None, shift=0, **params):
    sampling = SamplingParams(**{"temperature": 0, **(sampling or {})})
    spec = DiffusionSpec(MASK, shift, algorithm)
    filled = DiffusionParams(**params).filled(spec, sampling)
    filled.check(spec, sampling, 4, len(PROMPT))
    return BidirectionalCanvas(np.array(PROMPT), filled, sampling, spec, torch.Generator().manual_seed(seed))


def run(one, logits):
    """Denoise with `logits(canvas)`; the canvas after every step."""
    canvases = []
    while not one.done:
        one.decide(*one.choose(logits(one.tokens.tolist())[one.candidates()].clone()))
        canvases.append(one.tokens[len(PROMPT) :].tolist())
    return canvases


@pytest.mark.parametrize(("gen", "steps", "block"), [(16, 16, 16), (16, 8, 8), (24, 12, 8), (12, 10, 6), (6, 18, 3)])
def test_low_confidence_is_lladas(plain, gen, steps, block):
    one = denoiser(gen_length=gen, steps=steps, block_length=block)
    assert run(one, plain["llada"].logits)[-1] == llada(plain["llada"], PROMPT, gen, steps, block)


@pytest.mark.parametrize("algorithm", ["entropy", "maskgit_plus", "topk_margin"])
@pytest.mark.parametrize(("gen", "steps"), [(16, 16), (16, 7), (12, 40)])
def test_dreams_algorithms(plain, algorithm, gen, steps):
    one = denoiser(gen_length=gen, steps=steps, algorithm=algorithm, shift=1)
    assert run(one, plain["dream"].logits)[-1] == dream(plain["dream"], PROMPT, gen, steps, algorithm, 1e-3)


def test_what_is_decided_stays_and_the_mask_is_never_said(plain):
    for algorithm in ("low_confidence", "entropy", "origin"):
        one = denoiser(gen_length=16, steps=8, algorithm=algorithm, sampling={"temperature": 1.5}, block_length=8)

        def logits(canvas):
            found = plain["llada"].logits(canvas)
            found[:, MASK] = 50.0
            return found

        before = [MASK] * 16
        for canvas in run(one, logits):
            assert all(old in (new, MASK) for old, new in zip(before, canvas, strict=True))
            before = canvas
        assert MASK not in before


def test_origin_decides_each_mask_with_the_schedules_probability():
    uniform = lambda canvas: torch.zeros(len(canvas), VOCAB)  # noqa: E731
    first = []
    for seed in range(400):
        one = denoiser(algorithm="origin", gen_length=40, steps=4, block_length=40, seed=seed)
        one.decide(*one.choose(uniform(one.tokens)[one.candidates()]))
        first.append(40 - len(one.candidates()))
    expected = float(1 - torch.linspace(1, 1e-3, 5)[1])
    assert np.mean(first) == pytest.approx(40 * expected, rel=0.05)


def test_a_request_draws_from_its_own_seed(plain):
    def tokens(seed, **sampling):
        one = denoiser(gen_length=16, seed=seed, sampling={"temperature": 1.0, **sampling})
        return run(one, plain["llada"].logits)[-1]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(1, top_k=1) == tokens(2, top_p=1e-6) == llada(plain["llada"], PROMPT, 16, 16, 16)


def test_gumbel_draws_from_the_softmax_at_the_temperature():
    wanted = torch.tensor([1.0, 0.0, -1.0, 2.0])
    one = denoiser(gen_length=4000, steps=1, block_length=4000, sampling={"temperature": 0.7})
    logits = torch.full((4000, VOCAB), -1e4)
    logits[:, :4] = wanted
    one.decide(*one.choose(logits))
    counts = np.bincount(one.tokens[len(PROMPT) :], minlength=VOCAB)[:4] / 4000
    assert counts == pytest.approx((wanted / 0.7).softmax(-1).numpy(), abs=0.03)


def test_alg_temp_draws_positions():
    """With very large alg_temp every position is as likely to be decided first."""
    firsts = np.zeros(8)
    for seed in range(400):
        one = denoiser(gen_length=8, steps=8, alg_temp=100.0, seed=seed, algorithm="maskgit_plus", eps=0.1)
        logits = torch.zeros(8, VOCAB)
        logits[3, 7] = 9.0
        one.decide(*one.choose(logits))
        firsts[7 - np.flatnonzero(one.tokens[: len(PROMPT) - 1 : -1] != MASK)] += 1
    assert firsts.sum() == 400
    assert firsts.min() > 20


def test_the_bias_and_the_filters():
    one = denoiser(gen_length=4, sampling={"logit_bias": {9: 100.0}})
    one.decide(*one.choose(torch.zeros(4, VOCAB)))
    assert (one.tokens == 9).sum() == 1
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    kept = restrict(logits, SamplingParams(top_k=2, top_p=0.7)).isfinite()
    # Top-p first: after top-k the second would have no place in it.
    assert kept.tolist() == [[True, True, False, False], [False, False, True, False]]


def test_parallel_decoding_by_threshold_and_by_factor():
    confidence = torch.tensor([0.2, 0.95, 0.5, 0.9])
    assert by_threshold(confidence.clone(), 0.9).tolist() == [1, 3]
    assert by_threshold(confidence.clone(), 0.99).tolist() == [1], "the most confident always"
    # In order 0.95, 0.9, 0.5, 0.2; the n-th needs 1 - factor / (n + 1).
    assert by_factor(confidence, 0.4).tolist() == [1, 3], "0.9 >= 0.87, 0.5 < 0.9"
    assert by_factor(confidence, 0.1).tolist() == [1]
    assert by_factor(confidence, 3.5).tolist() == [1, 3, 2], "0.5 >= 0.125, 0.2 < 0.3"


@pytest.mark.parametrize(
    ("params", "sampling", "param"),
    [
        ({"gen_length": 10, "block_length": 4}, {}, "block_length"),
        ({"gen_length": 8, "block_length": 4, "steps": 5}, {}, "steps"),
        ({"threshold": 0.9, "factor": 1.0}, {}, "factor"),
        ({"threshold": 0.9, "algorithm": "entropy"}, {}, "threshold"),
        ({"depth": 5}, {}, "depth"),
        ({"prefix_tokens": 8}, {}, "prefix_tokens"),
        ({}, {"min_p": 0.1}, "min_p"),
        ({}, {"frequency_penalty": 0.1}, "frequency_penalty"),
        ({}, {"regex": "a+"}, "regex"),
        ({}, {"json_schema": "{}"}, "json_schema"),
        ({}, {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(params, sampling, param):
    with pytest.raises(InvalidRequest) as error:
        denoiser(sampling=sampling, **params)
    assert error.value.param.removeprefix("diffusion.") == param
