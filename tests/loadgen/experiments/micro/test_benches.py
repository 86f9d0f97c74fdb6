"""`ramet bench drafts`, `tiers` and `tree` on a small model and small trees."""

import random

import pytest

from loadgen.experiments.micro.bench_tiers import Tiers
from loadgen.harness import BenchError
from radix import POLICIES


def test_both_ways_answer_the_same_questions(measured, tiny_dir):
    small = ["--engine", "dtype=float32", "--tasks", "edit", "again", "--clients", 2, "--output", 16, "--questions", 1]
    found = measured("drafts", "--model", tiny_dir, *small, repeats=2)
    assert sorted((one["task"], one["drafts"]) for one in found) == [
        (task, way) for task in ("again", "edit") for way in ("auto", "off") for _ in "12"
    ]
    for one in found:
        assert min(one["rate"], one["by_cpu"]) > 0
        assert one["drafted"] == 0 or one["drafts"] == "auto"
        assert 0 <= one.get("right", 0) <= 1
    assert any(one["drafted"] for one in found)


def test_every_source_is_measured_and_a_computed_prefix_is_not_taken_for_a_loaded_one(tiny_dir, tmp_path, monkeypatch):
    # Load from the tiers even if this machine computes sooner.
    monkeypatch.setattr("runtime.features.tiers.tiers.Tiers.computed", lambda self, rows, seconds: None)
    bench = Tiers(model=str(tiny_dir), directory=tmp_path, requests=4, prefix=256, question=16, shared=96)
    with bench.session():
        found = [cell | bench.measure(cell, random.Random(0)) for cell in bench.cells()]
        monkeypatch.setattr("loadgen.experiments.micro.bench_tiers._loaded", lambda drive, tier: 0)
        with pytest.raises(BenchError, match="did not come from host"):
            bench.measure({"work": "first token", "KV": "host"}, random.Random(0))
    first = {one["KV"]: one["ttft"] for one in found if "ttft" in one}
    assert first.keys() == {"computed", "pool", "host", "disk", "store"}
    assert min(first.values()) > 0
    assert [one["KV"] for one in found if "rate" in one] == ["computed", "all tiers"] * 2
    assert all(one["p50"] <= one["p99"] for one in found if "p99" in one)
    assert min(one["cpu"] for one in found if "cpu" in one) > 0


def test_every_operation_is_measured(measured, monkeypatch):
    monkeypatch.setattr("loadgen.experiments.micro.bench_tree._EVICTED", 100)
    prompts, *evictions = measured("tree", "--page-sizes", 16, "--leaves", 50)
    assert [one["policy"] for one in evictions] == [*POLICIES, "lru"]
    assert min(prompts[name] for name in ("insert", "match", "miss", "lock", "chain", "chain_lock")) > 0
    for one in evictions:
        assert 0 < one["evict"] <= one["evict_p90"]
        assert min(one["insert"], one["flush"], one["bytes"]) > 0
