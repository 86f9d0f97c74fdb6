"""Messages between a front end and the engine."""

import pytest

from radix import Namespace
from runtime.asks import (
    DocumentsAsk,
    DocumentsReport,
    EntryAsk,
    ExactDocumentsReport,
    ModulesAsk,
    ModulesReport,
    ReasoningAsk,
    ReasoningReport,
)
from runtime.denoising import BidirectionalParams, BlockParams, DenoisingReport, NoiseParams, SharedPrefixReport
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
        {"ask": ModulesAsk([EntryAsk(b"\1\0\0\0", [(0, 4)], [(0, 1)], "/m")], [(0, 9)], "s")},
        {"ask": DocumentsAsk("legolink", [(1, 40)], ["a"], None, "page", 32, 16, 4)},
        {"ask": ReasoningAsk(75.5)},
        {"diffusion": BidirectionalParams(gen_length=8, prefix_tokens=3)},
        {"diffusion": BlockParams(threshold=0.5)},
        {"diffusion": NoiseParams(t_min=0.25)},
    ],
)
def test_requests_arrive_as_they_were_sent(fields):
    sent = AddRequest("r", b"\1\0\0\0", **fields)
    assert inbound_decoder.decode(encode(sent)) == sent


# Reports, and the fields that answers have of them, in order.
COUNTS = {"reused_tokens": 64, "computed_tokens": 9}
OPTIONS = {"ratio": None, "granularity": "token", "chunk_tokens": 512}
CHOSEN = {"documents": ["a", "b"], "computed_documents": ["b"], "chosen_before": True, "recomputed_rows": 7}
PAGES = {"approximate": True, "substituted_pages": 3, "amsr": 0.25}
TOKENS = {"first_substituted_token": 16, "exact_tokens": None, "recomputed": 0}
PREFIX = {"refreshes": 2, "prefix_ratio": 0.5, "denoise_steps": 8}
DEPTH = {"divergence_bound": 0.5, "refresh_interval": 4, "depth_divergence": None}


@pytest.mark.parametrize(
    ("report", "fields"),
    [
        (
            ModulesReport(modules=["/", "/a"], computed_modules=["/a"], **COUNTS),
            {"strategy": "modules", "exact": False, "exact_modules": True, "modules": ["/", "/a"],
             "computed_modules": ["/a"], **COUNTS},
        ),
        (
            DocumentsReport(
                method="legolink", **OPTIONS, k=4, **CHOSEN, row_layers=90, **COUNTS, auto="measured", note="new"
            ),
            {"strategy": "fusion", "exact": False, "method": "legolink", **OPTIONS, "k": 4, **CHOSEN, "row_layers": 90,
             **COUNTS, "auto": "measured", "note": "new"},
        ),
        (
            DocumentsReport(method="pie", row_layers=90, **OPTIONS, **CHOSEN, **COUNTS),
            {"strategy": "fusion", "exact": False, "method": "pie", **OPTIONS, **CHOSEN, "row_layers": 90, **COUNTS},
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
