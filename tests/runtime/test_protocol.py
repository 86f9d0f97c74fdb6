"""Messages between a front end and the engine."""

from typing import get_args

import pytest

from radix import Namespace
from runtime.asks import ReasoningAsk, ReasoningReport
from runtime.calls import AnyCall, EngineCall, OnNode
from runtime.features.chunks.ask import ChunksAsk, DocumentsReport, ExactDocumentsReport, ModuleAsk, ModulesReport
from runtime.features.diffusion.ask import (
    BidirectionalParams,
    BlockParams,
    DenoisingReport,
    NoiseParams,
    SharedPrefixReport,
)
from runtime.params import Lazy, SamplingParams
from runtime.protocol import (
    AddRequest,
    Limits,
    Sampling,
    StepEvents,
    TokenEvent,
    encode,
    inbound_decoder,
    outbound_decoder,
)

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
        {"decoding": BidirectionalParams(gen_length=8, prefix_tokens=3)},
        {"decoding": BlockParams(threshold=0.5)},
        {"decoding": NoiseParams(t_min=0.25)},
    ],
)
def test_requests_arrive_as_they_were_sent(fields):
    sent = AddRequest("r", b"\1\0\0\0", **fields)
    assert inbound_decoder.decode(encode(sent)) == sent


# Reports, and the fields that answers have of them, in order.
COUNTS = {"reused_tokens": 64, "computed_tokens": 9}
OPTIONS = {"ratio": None, "granularity": "token"}
CHOSEN = {"chosen_before": True, "recomputed_rows": 7, "row_layers": 90}
DOCUMENTS = {"chunk_tokens": 512, "documents": ["a", "b"], "computed_documents": ["b"]}
PAGES = {"approximate": True, "substituted_pages": 3, "amsr": 0.25}
TOKENS = {"first_substituted_token": 16, "exact_tokens": None, "recomputed": 0}
PREFIX = {"refreshes": 2, "prefix_ratio": 0.5, "denoise_steps": 8}
DEPTH = {"divergence_bound": 0.5, "refresh_interval": 4, "depth_divergence": None}


@pytest.mark.parametrize(
    ("report", "fields"),
    [
        (
            ModulesReport(modules=["/", "/a"], computed_modules=["/a"], **COUNTS),
            {"strategy": "modules", "exact": False, **COUNTS, "exact_modules": True, "modules": ["/", "/a"],
             "computed_modules": ["/a"]},
        ),
        (
            ModulesReport(exact=True, method="a3", **OPTIONS, **CHOSEN, modules=[], computed_modules=[], **COUNTS),
            {"strategy": "modules", "exact": True, "method": "a3", **OPTIONS, **CHOSEN, **COUNTS,
             "exact_modules": True, "modules": [], "computed_modules": []},
        ),
        (
            DocumentsReport(
                method="legolink", **OPTIONS, k=4, **CHOSEN, **COUNTS, **DOCUMENTS, auto="measured", note="new"
            ),
            {"strategy": "fusion", "exact": False, "method": "legolink", **OPTIONS, "k": 4, **CHOSEN, **COUNTS,
             "auto": "measured", "note": "new", **DOCUMENTS},
        ),
        (
            DocumentsReport(method="pie", **OPTIONS, **CHOSEN, **COUNTS, **DOCUMENTS),
            {"strategy": "fusion", "exact": False, "method": "pie", **OPTIONS, **CHOSEN, **COUNTS, **DOCUMENTS},
        ),
        (
            ExactDocumentsReport(documents=["a"], **COUNTS),
            {"strategy": "prefix", "exact": True, "method": "none", "documents": ["a"], **COUNTS},
        ),
        (
            ReasoningReport(**PAGES, **TOKENS),
            {"strategy": "reasoncache", "method": "reasoncache", **PAGES, **TOKENS},
        ),
        (DenoisingReport(5), {"denoise_steps": 5}),
        (
            SharedPrefixReport(shallow_depth=0, encoded_tokens=0, unshared="off", **PREFIX),
            {"shallow_depth": 0, "encoded_tokens": 0, "unshared": "off", **PREFIX},
        ),
        (
            SharedPrefixReport(shallow_depth=2, encoded_tokens=32, **PREFIX, **DEPTH),
            {"shallow_depth": 2, "encoded_tokens": 32, **PREFIX, **DEPTH},
        ),
    ],
)  # fmt: skip
def test_reports_arrive_as_they_were_sent_and_answers_have_their_fields_in_order(report, fields):
    sent = StepEvents([TokenEvent("r", [1], reuse=report)])
    assert (received := outbound_decoder.decode(encode(sent))) == sent
    assert [*received.events[0].reuse.fields().items()] == [*fields.items()]


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


def test_the_engine_reads_every_call():
    """One that the union lacks would end the engine, which could not decode it."""
    assert {*get_args(AnyCall)} == {*EngineCall.__subclasses__(), *OnNode.__subclasses__()} - {OnNode}
