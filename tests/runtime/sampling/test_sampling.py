"""Sampling: filters against a plain reading of their definitions, penalties, seeds, and the drawn distribution."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.params import SamplingParams
from runtime.request import Request
from runtime.sampler_state import NO_TOKEN, TokenChoice
from runtime.sampling.choosing import TorchChoosing, adjust, draw, exponential
from runtime.sampling.filters import filter_probs, keep_top
from runtime.sampling.sampler import Sampler
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.requests import make_request

CPU = torch.device("cpu")


def request(tokens=(1,), prompt_len=1, **params) -> Request:
    return make_request(tokens, sampling=SamplingParams(**params), prompt_len=prompt_len)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-500, 500), min_size=2, max_size=20, unique=True),
    st.integers(-1, 25),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.9),
    st.floats(0.2, 3.0),
)
def test_filters_are_what_they_say(hundredths, top_k, top_p, min_p, temperature):
    values = [h / 100 for h in hundredths]  # apart in float32 too: a tie may fall either way
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    got = filter_probs((torch.tensor(values) / temperature).softmax(0), params)
    probs = torch.softmax(torch.tensor(values) / temperature, 0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if 0 < top_k < len(probs):
        order = order[:top_k]
        total = sum(probs[i] for i in order)
        probs = [p / total for p in probs]
    kept, mass = [], 0.0
    for i in order:
        if top_p < 1 and mass >= top_p - 1e-6:
            if mass < top_p + 1e-6:
                return  # on the edge, where rounding decides
            break
        kept.append(i)
        mass += probs[i]
    top = max(probs[i] for i in kept)
    if any(abs(probs[i] - min_p * top) < 1e-6 for i in kept):
        return
    kept = [i for i in kept if probs[i] >= min_p * top]
    assert set(torch.nonzero(got)[:, 0].tolist()) == set(kept)


def top_by_sorting(probs: torch.Tensor, mass: float) -> torch.Tensor:
    """Top-p token by token, in exact fractions."""
    kept, total, values = torch.zeros_like(probs), Fraction(0), probs.tolist()
    for token in sorted(range(len(values)), key=lambda token: -values[token]):
        if total >= mass:
            break
        kept[token] = values[token]
        total += math.floor(Fraction(values[token]) * 2**52) * Fraction(1, 2**52)
    return kept


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.02, 0.5, 2.0, 4.0, 9.0]),
    st.sampled_from([0, 4, 64]),
    st.sampled_from([0.01, 0.5, 0.9, 0.999]),
)
def test_top_p_counts_as_sorting_does_ties_included(seed, spread, ties, mass):
    logits = torch.randn(6000, generator=torch.Generator().manual_seed(seed)) * spread
    probs = ((logits * ties).round() / ties if ties else logits).softmax(0)
    assert torch.equal(keep_top(probs, mass), top_by_sorting(probs, mass))


def test_top_p_of_a_batch_is_that_of_each_row():
    logits = torch.randn(4, 6000, generator=torch.Generator().manual_seed(3)) * torch.tensor([[0.1], [1], [3], [8]])
    params = [SamplingParams(temperature=t, top_p=p) for t, p in [(1, 0.9), (0.7, 0.99), (1.5, 0.5), (1, 1)]]
    got = TorchChoosing().filter(logits, params)
    for row, probs, p in zip(got, logits, params, strict=True):
        probs = (probs / p.temperature).softmax(0)
        assert torch.equal(row, top_by_sorting(probs, p.top_p) if p.top_p < 1 else probs)


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampler, one = Sampler(4, CPU), request(seed=1)
    counts = torch.zeros(4)
    for _ in range(2000):
        (token,) = sampler.sample(logits, [one]).read()
        counts[token] += 1
        one.tokens.append(token)
    expected = torch.softmax(logits[0], 0)
    assert ((counts / 2000 - expected).abs() < 5 * (expected * (1 - expected) / 2000).sqrt()).all()


def test_many_rows_draw_what_each_draws_alone():
    logits, sampler = torch.randn(150, 40, generator=torch.Generator().manual_seed(1)), Sampler(40, CPU)
    asking = [request(seed=i, temperature=0.5 + i / 100) for i in range(150)]
    alone = [sampler.sample(row[None], [one]).read()[0] for row, one in zip(logits, asking, strict=True)]
    assert sampler.sample(logits, asking).read() == alone


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-3, 0.25, 3.0]), min_size=1, max_size=200), st.integers(0, 9))
def test_each_token_is_drawn_as_often_as_it_weighs_and_none_without_weight(weights, seed):
    if not sum(weights):
        return
    trials = 3000
    streams = torch.randint(1 << 62, (trials,), generator=torch.Generator().manual_seed(seed))
    tokens = draw(torch.tensor([weights]).expand(trials, -1), streams)
    counts = torch.bincount(tokens, minlength=len(weights)).double()
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    assert (counts[expected == 0] == 0).all()
    assert ((counts / trials - expected).abs() <= 6 * (expected * (1 - expected) / trials).sqrt() + 6 / trials).all()


def test_the_noise_is_exponential():
    noise = exponential(torch.arange(200), 500).sort(dim=-1).values
    assert noise.min() > 0
    shares = torch.arange(1, 501) / 500
    assert (1 - (-noise).exp() - shares).abs().max() < 0.11  # Kolmogorov and Smirnov: 2.3 / sqrt(500)


def test_weights_that_are_no_numbers_draw_no_token_and_leave_the_others_alone():
    weights = torch.full((3, 100), 0.01)
    alone = draw(weights, torch.arange(3)).tolist()
    weights[1, 50] = math.nan
    assert draw(weights, torch.arange(3)).tolist() == [alone[0], NO_TOKEN, alone[2]]


def test_each_request_of_a_batch_gets_as_many_alternatives_as_it_wants():
    asking = [make_request([1], logprobs=top) for top in (0, 3, None, 1)]
    found = Sampler(9, CPU).sample(torch.randn(4, 9), asking).logprobs()
    assert [len(found[one][0].top) if one in found else None for one in asking] == [0, 3, None, 1]


def test_penalties():
    logits = torch.tensor([[1.0, 1.0, -1.0, 0.5]])
    sampler = Sampler(4, CPU)

    def adjusted(**params):
        asking, found = request((0, 1, 1), 1, temperature=0, **params), logits[0].clone()
        choice = TokenChoice(0, asking.sampler.params)
        sampler._restrict(choice, asking, 0)
        adjust(found, choice)
        return found.tolist()

    assert adjusted(frequency_penalty=0.25) == [1.0, 0.5, -1.0, 0.5]
    assert adjusted(presence_penalty=0.25) == [1.0, 0.75, -1.0, 0.5]
    assert adjusted(repetition_penalty=2.0) == [0.5, 0.5, -1.0, 0.5]
    assert adjusted(logit_bias={2: 5}) == [1.0, 1.0, 4.0, 0.5]
    assert sampler.sample(logits, [request((0,), 1, temperature=0, logit_bias={3: 50})]).read() == [3]


def test_tokens_that_are_not_allowed_or_end_a_bad_word_are_not_chosen():
    logits, sampler = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), Sampler(4, CPU)

    def chosen(tokens, words=(), allowed=()):
        params = SamplingParams(temperature=0, allowed_token_ids=allowed, bad_words=["x"] * len(words))
        one = make_request(tokens, sampling=params, prompt_len=1, bad_words=list(words))
        (token,) = sampler.sample(logits, [one]).read()
        return token

    assert chosen((1,), allowed=(2, 3)) == 2
    assert chosen((1,), [[0]]) == 1
    assert chosen((1, 3), [[3, 0], [3, 1], [2]]) == 3
    assert chosen((3,), [[3, 0]]) == 0  # the prompt is no part of the output
    assert isinstance(chosen((1,), [[2]], (2,)), InvalidRequest)


def test_a_bad_word_may_begin_in_a_draft():
    params = SamplingParams(temperature=0, bad_words=["x"])
    one = make_request((1,), sampling=params, prompt_len=1, bad_words=[[0, 0, 0]])
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 4)
    sampled = Sampler(4, CPU).sample(logits, [one] * 4, expected=[None, 0, 0, 1])
    assert sampled.chosen() == {one: [0, 0, 1, 0]}


def test_penalty_counts_follow_the_output():
    sampler, one = Sampler(3, CPU), request((0,), 1, temperature=0, frequency_penalty=2.0)
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    drawn = []
    for _ in range(5):
        (token,) = sampler.sample(logits, [one]).read()
        one.tokens.append(token)
        drawn.append(token)
    assert drawn == [1, 2, 1, 0, 2]


def test_tokens_of_entries_are_prompt_for_penalties():
    sampler, one = Sampler(3, CPU), request((0,), 1, temperature=0, frequency_penalty=2.0)
    one.entry_tokens.extend([1, 2, 2])
    for token in (1, 2):
        one.sampler.seen = None  # as after a step that is run again
        assert sampler.sample(torch.tensor([[0.0, 3.0, 2.0]]), [one]).read() == [token]
        one.tokens.append(token)


def test_a_seed_gives_the_same_tokens_in_any_company(tiny_dir):
    prompt = [9, 8, 7]
    alone = Driver(make_core(tiny_dir))
    (expected,) = alone.together([prompt], max_new_tokens=10, temperature=1.0, seed=42)
    crowd = Driver(make_core(tiny_dir, prefix_cache=False))
    for i in range(5):
        crowd.add(f"other{i}", [i, 3], max_new_tokens=12, temperature=1.0)
    crowd.step()
    crowd.add("same", prompt, max_new_tokens=10, temperature=1.0, seed=42)
    crowd.add("different", prompt, max_new_tokens=10, temperature=1.0, seed=43)
    crowd.run()
    assert crowd.tokens["same"] == expected
    assert crowd.tokens["different"] != expected


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"max_new_tokens": -1},
        {"n": 0},
        {"n": 1000},
        {"stop": ["x"] * 17},
        {"stop": [""]},
        {"seed": -2},
        {"logit_bias": {1: 1000}},
        {"unknown": 1},
    ],
)
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_token_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(InvalidRequest, match="out of range"):
        SamplingParams(logit_bias={100: 1.0}).check(100)
    with pytest.raises(InvalidRequest, match="out of range"):
        SamplingParams(allowed_token_ids=[100]).check(100)
    with pytest.raises(InvalidRequest, match="min_new_tokens"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4).check(100)


@pytest.mark.parametrize(
    ("params", "best"),
    [
        ({"temperature": 0}, True),
        ({"top_k": 1}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 0, "frequency_penalty": 0.5}, False),
        ({"temperature": 0, "presence_penalty": 0.5}, False),
        ({"temperature": 0, "repetition_penalty": 1.1}, False),
        ({"temperature": 0, "min_new_tokens": 2}, False),
        ({"temperature": 0, "regex": "a+"}, False),
        ({"temperature": 0, "allowed_token_ids": [1]}, False),
        ({"temperature": 0, "bad_words": ["a"]}, False),
    ],
)
def test_only_greedy_requests_that_change_no_logit_take_the_best(params, best):
    assert SamplingParams(**params).takes_best is best
