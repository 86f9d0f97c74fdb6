"""`ramet bench tiers` on a small model."""

from __future__ import annotations

import pytest

from loadgen.harness import BenchError
from loadgen.harness.run import execute
from loadgen.micro.bench_tiers import Tiers

SMALL = {"requests": 4, "prefix": 256, "question": 16, "shared": 96}


def test_every_source_is_measured(measured, tiny_dir, tmp_path, monkeypatch):
    # Whatever a tier has is loaded, however quick this machine computes.
    monkeypatch.setattr("runtime.kv.tiers.tiers.Tiers.computed", lambda self, rows, seconds: None)
    options = [part for name, value in SMALL.items() for part in (f"--{name}", value)]
    found = measured("tiers", "--model", tiny_dir, "--directory", tmp_path, *options)
    first = {one["KV"]: one["ttft"] for one in found if "ttft" in one}
    assert first.keys() == {"computed", "pool", "host", "disk", "store"}
    assert min(first.values()) > 0
    assert [one["KV"] for one in found if "rate" in one] == ["computed", "all tiers"] * 2
    assert all(one["p50"] <= one["p99"] for one in found if "p99" in one)
    assert min(one["cpu"] for one in found if "cpu" in one) > 0


def test_a_prefix_that_is_computed_in_place_of_loaded_ends_the_bench(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.kv.tiers.tiers.Tiers.find", lambda *args, **more: None, raising=False)
    monkeypatch.setattr("loadgen.micro.bench_tiers._loaded", lambda drive, tier: 0)
    with pytest.raises(BenchError, match="did not come from host"):
        execute("tiers", Tiers(model=str(tiny_dir), directory=tmp_path, repeats=1, warmup=0, **SMALL))
