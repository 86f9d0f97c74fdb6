"""The figures of a run, recomputed from its raw record by other means."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.http.arrivals import Constant
from loadgen.http.bench_compare import METRICS, ratio_interval
from loadgen.http.client import Timeouts
from loadgen.http.files import read_run, write_csv, write_json
from loadgen.http.load import Bounds
from loadgen.http.record import Record
from loadgen.http.run_tables import figure_table
from loadgen.http.slo import Slo
from loadgen.http.summary import spread, summarise
from loadgen.http.workloads.base import length
from loadgen.http.workloads.prompts import SharedPrefix
from tests.loadgen.helpers import run


@pytest.fixture(scope="module")
def recorded(ramet, tmp_path_factory):
    """A run against the real server, as it was written to a file."""
    workload = SharedPrefix(groups=2, prefix_tokens=length("60"), prompt_tokens=length("uniform:5:30"),
                            output_tokens=length("uniform:1:9"))  # fmt: skip
    result = run(ramet.url, workload=workload, arrivals=Constant(20.0), bounds=Bounds(requests=30),
                 slo=Slo.parse(["ttft:400", "itl:150"]), timeouts=Timeouts())  # fmt: skip
    path = tmp_path_factory.mktemp("run") / "run.json"
    write_json(path, result.as_dict())
    return result, json.loads(path.read_text()), path


def near(value):
    return pytest.approx(value, abs=2e-6)  # the file has whole microseconds


def test_percentiles_are_numpys_on_what_was_recorded(recorded):
    _, data, _ = recorded
    requests = data["requests"]
    assert len(requests) == data["summary"]["completed"] == 30
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
        found = data["summary"]["latency"][kind]
        assert found["mean"] == near(np.mean(values))
        assert found["max"] == near(np.max(values))
        for point in (50, 90, 95, 99):
            assert found[f"p{point}"] == near(np.percentile(values, point))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_percentiles_are_those_of_the_definition(values):
    """Linear between the two nearest ranks, written out."""
    found = spread(values)
    ordered = sorted(values)
    for point in (50, 90, 95, 99):
        rank = (len(ordered) - 1) * point / 100
        low, share = math.floor(rank), rank - math.floor(rank)
        high = min(low + 1, len(ordered) - 1)
        assert found[f"p{point}"] == pytest.approx(ordered[low] * (1 - share) + ordered[high] * share, rel=1e-9)


def test_throughput_hits_and_goodput_are_those_of_the_record(recorded):
    _, data, _ = recorded
    requests, summary = data["requests"], data["summary"]
    seconds = max(r["end_s"] for r in requests) - min(r["scheduled_s"] for r in requests)
    assert summary["seconds"] == near(seconds)
    assert summary["request_throughput"] == pytest.approx(30 / seconds, rel=1e-4)
    for name, field in (("input", "prompt_tokens"), ("output", "output_tokens"), ("cached", "cached_tokens")):
        assert summary[f"{name}_tokens"] == sum(r[field] for r in requests)
    assert summary["output_throughput"] == pytest.approx(summary["output_tokens"] / seconds, rel=1e-4)
    assert summary["hit_ratio"] == summary["cached_tokens"] / summary["input_tokens"] > 0.3
    kept = [
        r["arrivals_s"][0] - r["scheduled_s"] <= 0.4 and max(np.diff(r["arrivals_s"]), default=0) <= 0.15
        for r in requests
    ]
    assert summary["goodput"]["requests"] == sum(kept)
    assert summary["goodput"]["request_throughput"] == pytest.approx(sum(kept) / seconds, rel=1e-4)


def test_the_servers_own_counters_say_the_same(recorded):
    result, data, _ = recorded
    assert data["server_metrics"]["hit_ratio"] == pytest.approx(result.summary["hit_ratio"])


def test_lengths_are_what_was_asked_for(recorded):
    """Prompts are counted with the server's tokenizer: the prefix, the question, and a few tokens that join them."""
    _, data, _ = recorded
    assert data["summary"]["wrong_length"] == 0
    assert all(60 + 5 - 3 <= r["prompt_tokens"] <= 60 + 30 + 4 for r in data["requests"])


def test_a_run_is_read_as_it_was_written(recorded, tmp_path):
    result, _, path = recorded
    _, records = read_run(path)
    assert [r.as_dict() for r in records] == [r.as_dict() for r in result.records]
    write_csv(tmp_path / "a.csv", result.records)
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert len(lines) == 31
    assert lines[0].startswith("number,session,turn,group,scheduled_s")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "other"}', '{"format": "ramet-bench-1", "requests": [7]}']
)
def test_what_is_no_run_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not the result of a run"):
        read_run(path)


def test_a_run_without_answers_has_figures():
    assert summarise([])["latency"] == {}
    failed = Record(0, scheduled_s=1.0, sent_s=1.0, end_s=3.0, error="stall")
    summary = summarise([failed], Slo.parse(["ttft:1"]))
    assert summary["errors"] == {"stall": 1}
    assert (summary["output_throughput"], summary["hit_ratio"], summary["goodput"]["share"]) == (0, None, 0)


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


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000))
def test_intervals_hold_the_ratio_of_the_samples(seed):
    rng = np.random.default_rng(seed)
    mine, base = rng.exponential(2.0, 60), rng.exponential(1.0, 60)
    low, high = ratio_interval(mine, base, np.mean, 200, rng)
    assert low < mine.mean() / base.mean() < high
    low, high = ratio_interval(base, base, np.mean, 200, rng)
    assert low < 1 < high


def test_intervals_cover_the_true_ratio():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        low, high = ratio_interval(rng.exponential(3.0, 80), rng.exponential(1.5, 80), np.mean, 200, rng)
        covered += low <= 2.0 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_compared_figures_are_those_of_the_summary(recorded):
    result, data, _ = recorded
    found = {m.name: m.factor * m.statistic(m.sample(result.records)) for m in METRICS}
    latency = data["summary"]["latency"]
    assert found["TTFT p90 ms"] == pytest.approx(1000 * latency["ttft"]["p90"])
    assert found["TPOT mean ms"] == pytest.approx(1000 * latency["tpot"]["mean"])
    assert found["hit ratio %"] == pytest.approx(100 * data["summary"]["hit_ratio"])
    assert found["output tokens/s"] == pytest.approx(data["summary"]["output_throughput"], rel=1e-3)


def test_cpu_time_of_a_token(recorded):
    """Of the client, and of the server by its metrics; those before and after are equal where it took next to none."""
    result, data, _ = recorded
    result.facts["server_metrics"]["counters"]["process_cpu_seconds"] = 0.5
    names, values = (list(column.cells) for column in figure_table(result).columns)
    shown, tokens = dict(zip(names, values, strict=True)), data["summary"]["output_tokens"]
    assert shown["CPU of the server's own process, us a token"] == f"{0.5e6 / tokens:.0f}"
    used_s = data["client"]["cpu_share"] * data["summary"]["seconds"]
    assert float(shown["CPU of the client, us a token"]) == pytest.approx(1e6 * used_s / tokens, abs=1)
