"""`ramet bench growth` on a small model: its rows, its bounds, and the requests behind them."""

from __future__ import annotations

import argparse
import json

import pytest

from loadgen.micro import bench_growth
from loadgen.micro.drive import Drive, matrix_weights
from runtime.models.spec import LlamaSpec


@pytest.fixture
def options(tiny_dir, tmp_path):
    parser = argparse.ArgumentParser()
    bench_growth.add_arguments(parser)
    small = ["--dtype", "float32", "--contexts", "128", "--batches", "1", "3", "--steps", "4", "--repeats", "2"]
    files = ["--json", str(tmp_path / "g.json"), "--plot", str(tmp_path / "g.png")]
    return parser.parse_args(["--model", str(tiny_dir), *small, *files])


def test_it_measures_and_writes(options, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_growth, "_SHARED", 256)
    assert bench_growth.run(options) == 0
    figures = json.loads((tmp_path / "g.json").read_text())
    assert [row["tokens"] for row in figures["context"]] == [128]
    assert [row["requests"] for row in figures["batch"]] == [1, 3]
    for row in (*figures["context"], *figures["batch"], figures["bounds"]):
        assert all(value > 0 for value in row.values())
    assert (tmp_path / "g.png").stat().st_size > 10_000


def test_a_drive_adds_requests_and_decodes_to_the_end(tiny_dir):
    drive = Drive(tiny_dir, dtype="float32", pool_tokens=2048)
    try:
        prompt = drive.text(64)
        drive.add(prompt, 1)
        assert drive.first_tokens() > 0
        for _ in range(2):
            drive.add(prompt + drive.text(32), 6)
        drive.first_tokens()
        assert [request.cached_tokens for request in drive.core.requests.values()] == [64, 64]
        assert 4 <= len(drive.finish()) <= 5
        first, second = drive.tokens([prompt, prompt], 3)
        assert len(first) == 3
        assert first == second
        drive.add(prompt, 100)
        drive.end()
        assert not drive.core.requests
    finally:
        drive.close()


def test_matrix_weights_are_those_of_the_checkpoint(tiny_dir):
    spec = LlamaSpec.load(tiny_dir)
    shapes = spec.expected_tensors().values()
    body = sum(rows * columns for rows, *rest in shapes for columns in rest if rows != spec.vocab_size)
    assert matrix_weights(spec) == (body, spec.vocab_size * spec.hidden_size)
