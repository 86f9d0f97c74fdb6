"""The figures of a run, recomputed from its raw records by other means."""

import numpy as np
import pytest

from loadgen.harness import Results
from loadgen.http.arrivals import Gamma
from loadgen.http.client import Timeouts
from loadgen.http.details import details
from loadgen.http.load import Bounds
from loadgen.http.record import Record
from loadgen.http.slo import Slo
from loadgen.http.summary import summarise
from loadgen.http.workloads.base import length
from loadgen.http.workloads.prompts import SharedPrefix
from tests.loadgen.helpers import run


@pytest.fixture(scope="module")
def recorded(ramet):
    """A run against the real server, and its records."""
    workload = SharedPrefix(groups=2, prefix_tokens=length("60"), prompt_tokens=length("uniform:5:30"),
                            output_tokens=length("uniform:1:9"))  # fmt: skip
    result = run(ramet.url, workload=workload, arrivals=Gamma(20.0), bounds=Bounds(requests=30),
                 slo=Slo.parse(["ttft:400", "itl:150"]), timeouts=Timeouts())  # fmt: skip
    return result, [record.as_dict() for record in result.records]


def near(value):
    return pytest.approx(value, abs=2e-6)  # times are whole microseconds


def test_latencies_are_those_of_the_records(recorded):
    result, requests = recorded
    assert len(requests) == result.figures["completed"] == 30
    times = {
        "ttft": [r["arrivals_s"][0] - r["scheduled_s"] for r in requests],
        "e2e": [r["end_s"] - r["scheduled_s"] for r in requests],
        "itl": np.concatenate([np.diff(r["arrivals_s"]) for r in requests]),
        "tpot": [
            (r["arrivals_s"][-1] - r["arrivals_s"][0]) / (r["output_tokens"] - 1)
            for r in requests
            if r["output_tokens"] > 1
        ],
    }
    for kind, values in times.items():
        assert result.figures[kind] == near(list(values))


def test_throughput_hits_and_goodput_are_those_of_the_records(recorded):
    result, requests = recorded
    figures = result.figures
    seconds = max(r["end_s"] for r in requests) - min(r["scheduled_s"] for r in requests)
    assert figures["seconds"] == near(seconds)
    assert figures["request_throughput"] == pytest.approx(30 / seconds, rel=1e-4)
    for name, field in (("input", "prompt_tokens"), ("output", "output_tokens")):
        assert figures[f"{name}_tokens"] == sum(r[field] for r in requests)
    assert figures["output_throughput"] == pytest.approx(figures["output_tokens"] / seconds, rel=1e-4)
    assert figures["hit_ratio"] == sum(r["cached_tokens"] for r in requests) / figures["input_tokens"] > 0.3
    assert result.facts["server_metrics"]["hit_ratio"] == pytest.approx(figures["hit_ratio"]), "the server's own count"
    kept = [
        r["arrivals_s"][0] - r["scheduled_s"] <= 0.4 and max(np.diff(r["arrivals_s"]), default=0) <= 0.15
        for r in requests
    ]
    assert figures["goodput"] == sum(kept) / 30
    assert figures["goodput_throughput"] == pytest.approx(sum(kept) / seconds, rel=1e-4)


def test_lengths_are_what_was_asked_for(recorded):
    """Prompts are counted with the server's tokenizer: the prefix, the question, and a few tokens that join them."""
    result, requests = recorded
    assert result.figures["wrong_length"] == 0
    assert all(60 + 5 - 3 <= r["prompt_tokens"] <= 60 + 30 + 4 for r in requests)


def test_a_run_without_answers_has_figures():
    assert summarise([])["ttft"] == []
    failed = Record(0, scheduled_s=1.0, sent_s=1.0, end_s=3.0, error="stall", message="nothing came")
    figures = summarise([failed], Slo.parse(["ttft:1"]))
    assert (figures["errors"], figures["error_examples"]) == ({"stall": 1}, {"stall": "nothing came"})
    assert (figures["output_throughput"], figures["hit_ratio"], figures["goodput"]) == (0, None, 0)
    good = Record(1, scheduled_s=1.0, sent_s=1.0, end_s=2.0, arrivals_s=[1.0], first_s=1.0, output_tokens=1)
    assert summarise([good, failed], Slo.parse(["ttft:1"]))["goodput"] == 0.5, "a failure keeps no bound"


def test_service_levels():
    record = Record(0, scheduled_s=1.0, first_s=1.4, end_s=2.0, arrivals_s=[1.4, 1.5, 2.0], output_tokens=3)
    for kept, texts in ((True, ["ttft:400.1"]), (False, ["ttft:399"]), (True, ["tpot:301", "e2e:1000.1"]),
                        (False, ["itl:499"]), (False, ["ttft:500", "tpot:299"])):  # fmt: skip
        assert Slo.parse(texts).kept_by(record) is kept
    record.error = "cut"
    assert not Slo.parse(["ttft:1e9"]).kept_by(record)
    for text in ("ttft", "ttft:", "ttft:0", "ttft:nan", "speed:5", "ttft:-1"):
        with pytest.raises(ValueError, match="is not LATENCY:MILLISECONDS"):
            Slo.parse([text])


def test_details_name_warnings(recorded):
    result, _ = recorded
    facts = result.facts | {"client": result.facts["client"] | {"warning": "the client is slow"}}
    results = Results({}, ())
    results.add({"server": "a"}, 0, result.figures | {"facts": facts, "error_examples": {"cut": "[red]half"}})
    _, _, *warnings = details(results)
    assert [str(text) for text in warnings] == ["server a: the client is slow", "server a: failed, cut: [red]half"]
