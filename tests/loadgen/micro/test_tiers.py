"""`ramet bench tiers` on a small model and a small trace."""

from __future__ import annotations

import argparse
import json

import pytest

from loadgen.micro import bench_tiers
from loadgen.micro.tier_trace import block_token, infinite


@pytest.fixture
def options(tiny_dir, tmp_path):
    parser = argparse.ArgumentParser()
    bench_tiers.add_arguments(parser)
    lines = [{"timestamp": i, "hash_ids": [0, 1, 2, 10 * (i % 3) + 3, 10 * (i % 3) + 4]} for i in range(12)]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, lines)))
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png"), "--trace", str(tmp_path / "trace")]
    small = ["--rounds", "1", "--requests", "4", "--prefix", "256", "--question", "16", "--trace-pool", "12"]
    return parser.parse_args(["--model", str(tiny_dir), "--directory", str(tmp_path), *small, *files])


def test_a_trace_is_replayed_and_restarted(options, tmp_path, capsys, monkeypatch):
    # Whatever a tier has is loaded, however quick this machine computes.
    monkeypatch.setattr("runtime.kv.tiers.tiers.Tiers.computed", lambda self, rows, seconds: None)
    assert bench_tiers.run(options) == 0
    assert "This traffic wants" in " ".join(capsys.readouterr().out.split()[-20:]), "at the end"
    figures = json.loads((tmp_path / "t.json").read_text())
    share = figures["trace"]["cached, %"]
    assert share["pool"][0] <= share["+ host, 4 x pool"][0] <= share["+ disk"][0] <= share["infinite"][0]
    assert share["infinite"] == [100 * (60 - 9) / 60]
    assert share["+ disk"][0] > 75, "all but the last block of a prompt, whose last token is computed"
    restarted = figures["restart"]["cached, %"]
    assert len(restarted["pool"]) == 20
    assert restarted["pool"][6] == 0 < restarted["+ disk"][6], "the first request behind the restart"
    assert (tmp_path / "t.png").stat().st_size > 5_000


def test_parts_of_a_trace_want_one(options, tmp_path, capsys):
    options.parts, options.trace = ["trace"], None
    assert bench_tiers.run(options) == 2
    options.trace = tmp_path / "bad"
    options.trace.write_text('{"timestamp": 0, "hash_ids": "abc"}')
    assert bench_tiers.run(options) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "ramet bench: --parts trace needs --trace"
    assert "bad, line 1: not a request with timestamp and hash_ids" in told[1]


def test_first_tokens_and_writes_are_measured(options, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.kv.tiers.tiers.Tiers.computed", lambda self, rows, seconds: None)
    options.parts = ["ttft", "writes"]
    assert bench_tiers.run(options) == 0
    figures = json.loads((tmp_path / "t.json").read_text())
    assert figures["ttft"]["milliseconds"].keys() == {"computed", "pool", "host", "disk", "store"}
    assert all(values.keys() == {"without", "with"} for values in figures["writes"].values())
    assert all(value > 0 for values in figures["ttft"]["milliseconds"].values() for value in values)


def test_blocks_have_tokens_of_their_own():
    found = {tuple(block_token(block, i) for i in range(3)) for block in range(0, 300_000, 7)}
    assert len(found) == len(range(0, 300_000, 7))
    assert infinite([[1, 2], [1, 2, 3], [4]]) == 2 / 6
