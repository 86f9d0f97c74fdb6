"""Drawing for many requests at once: the filters of one, the streams of seeds, bad rows alone."""

import sys

import pytest
import torch

from runtime.params import SamplingParams
from runtime.request import Request
from runtime.sampling.batched import FlashInferChoosing
from runtime.sampling.filters import filter_probs
from runtime.sampling.sampler import BadLogits, Sampler
from tests.runtime.execution.attention.stand_in import stand_in
from tests.runtime.requests import make_request

SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05, "temperature": 2.0},
]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and FlashInfer")


def request(params: SamplingParams) -> Request:
    return make_request([1], sampling=params)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=GPU)])
def device(request, monkeypatch):
    if request.param == "cuda":
        return torch.device("cuda")
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    return torch.device("cpu")


def requests(**more) -> list[Request]:
    every = [{"temperature": 1.0} | given | more for given in SETTINGS]
    return [make_request([1], sampling=SamplingParams(**given)) for given in every]


def test_filters_are_those_of_one(device):
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)).mul(3).to(device)
    asking = requests()
    got = FlashInferChoosing().filter(logits, [request.sampler.params for request in asking])
    for row, found, request in zip(logits, got, asking, strict=True):
        wanted = filter_probs((row / request.sampler.params.divisor).softmax(0), request.sampler.params)
        assert torch.equal(found > 0, wanted > 0)
        torch.testing.assert_close(found / found.sum(), wanted / wanted.sum(), atol=1e-5, rtol=1e-4)


def test_seeds_draw_what_they_draw_alone(device):
    logits = torch.randn(5, 40).to(device)
    batched, single = Sampler(40, device, FlashInferChoosing()), Sampler(40, device)
    ours, theirs = requests(seed=11), requests(seed=11)
    found = set()
    for _ in range(20):
        alone = [single.sample(row[None], [request]).read()[0] for row, request in zip(logits, theirs, strict=True)]
        assert batched.sample(logits, ours).read() == alone
        for request, token in zip(ours + theirs, alone * 2, strict=True):
            request.tokens.append(token)
        found.add(tuple(alone))
    assert len(found) > 10, "every place has noise of its own"


def test_bad_rows_fail_alone_and_adjusted_ones_go_their_own_way(device):
    logits = torch.randn(5, 40).to(device)
    logits[2, 7] = float("nan")
    asking = requests()
    asking[4].sampler.params = SamplingParams(temperature=1.0, logit_bias={13: 100.0})
    found = Sampler(40, device, FlashInferChoosing()).sample(logits, asking).read()
    assert isinstance(found[2], BadLogits)
    assert found[4] == 13
    assert all(isinstance(token, int) for i, token in enumerate(found) if i != 2)


def test_without_seed_draws_follow_the_distribution(device):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 5).to(device)
    sampler, counts = Sampler(4, device, FlashInferChoosing()), torch.zeros(4)
    asking = [request(SamplingParams(temperature=1.0)) for _ in range(5)]
    for _ in range(400):
        for token in sampler.sample(logits, asking).read():
            counts[token] += 1
    torch.testing.assert_close(counts / 2000, logits[0].cpu().softmax(-1), atol=0.05, rtol=0)
