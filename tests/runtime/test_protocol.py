"""Messages between a front end and the engine."""

import pytest

from radix import Namespace
from runtime.asks import ReasoningAsk
from runtime.denoising import BidirectionalParams, BlockParams, NoiseParams
from runtime.features.chunks.ask import ChunksAsk, ModuleAsk
from runtime.params import Lazy, SamplingParams
from runtime.protocol import AddRequest, Limits, Sampling, encode, inbound_decoder

LAZY = Lazy(triggers=["<call>"], starts=["{"], to_end=True)
SAMPLING = SamplingParams(logit_bias={7: -1.5}, stop_token_ids=[3], seed=1 << 62, grammar='root ::= "a"', lazy=LAZY)


class Given(SamplingParams):
    """Parameters as a route reads them, with more fields."""

    stream: bool = False


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SAMPLING, "namespace": Namespace("t", salt="s"), "breakpoints": [(16, 300.0)]},
        {"ask": ChunksAsk(modules=[ModuleAsk(b"\1\0\0\0", [(0, 4)], [(0, 1)], "/m")], anchors=[(0, 9)], schema="s")},
        {"ask": ChunksAsk("legolink", [(1, 40)], ["a"], granularity="page", chunk_tokens=32, shortest=16, k=4)},
        {"ask": ReasoningAsk(75.5)},
        {"diffusion": BidirectionalParams(gen_length=8, prefix_tokens=3)},
        {"diffusion": BlockParams(threshold=0.5)},
        {"diffusion": NoiseParams(t_min=0.25)},
    ],
)
def test_requests_arrive_as_they_were_sent(fields):
    sent = AddRequest("r", b"\1\0\0\0", **fields)
    assert inbound_decoder.decode(encode(sent)) == sent


def test_a_completion_s_own_limits_replace_those_of_its_body():
    common = inbound_decoder.decode(encode(Sampling(Given(temperature=0.5, lazy=LAZY, regex="a+"), [[1, 2]])))
    first, other = (
        common.complete(inbound_decoder.decode(encode(AddRequest("r", b"", limits=Limits(9, 2, seed)))))
        for seed in (5, 6)
    )
    assert first.sampling == SamplingParams(
        temperature=0.5, lazy=LAZY, regex="a+", max_new_tokens=9, min_new_tokens=2, seed=5
    )
    assert (type(first.sampling), other.sampling.seed, other.bad_words) == (SamplingParams, 6, [[1, 2]])
