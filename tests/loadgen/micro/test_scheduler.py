"""`ramet bench scheduler`: every request of a simulated load ends, and the policies differ where they should."""

from __future__ import annotations

import argparse
import json
from typing import get_args

import pytest

from loadgen.micro import bench_scheduler
from runtime.config import SchedulePolicy

POLICIES = get_args(SchedulePolicy)


@pytest.fixture
def run(tmp_path):
    """Runs a small simulation; returns its figures."""

    def call(*more):
        parser = argparse.ArgumentParser()
        bench_scheduler.add_arguments(parser)
        path = tmp_path / "out.json"
        small = {
            "requests": 120,
            "concurrency": 12,
            "running": 4,
            "pool-tokens": 60000,
            "seed": 3,
            "waiting": 5,
            "nodes": 20,
        }
        given = [part for name, value in small.items() for part in (f"--{name}", f"{value}")]
        assert bench_scheduler.run(parser.parse_args([*given, "--json", str(path), *more])) == 0
        return json.loads(path.read_text())

    return call


def test_figures_of_every_policy(run):
    figures = run("--cold", "0.2")
    (load,) = figures["ttft"].values()
    assert load.keys() == figures["cost"]["5 wait"].keys() == figures["cost"]["20 nodes"].keys() == set(POLICIES)
    for row in load.values():
        assert 0 < row["p50"] <= row["p99"] <= row["max"] <= row["seconds"]
        assert 0 < row["cached"] < 0.97
    # Longest match first lets the cold ones wait.
    assert load["lpm"]["max"] > load["fcfs"]["max"]


def test_a_trace_is_replayed(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 700, "output_length": 4, "hash_ids": [i % 2, 10 + i]} for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    figures = run("--trace", str(trace), "--window", "1", "--speeds", "1", "4")["ttft"]
    slow, fast = (figures[f"trace, {speed} x"]["fcfs"] for speed in (1, 4))
    # Ten of the requests; the first block is cached for all but the first of each kind.
    assert slow["cached"] == pytest.approx(8 * 512 / (10 * 700), abs=0.01)
    assert fast["seconds"] < slow["seconds"]
