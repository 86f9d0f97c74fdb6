"""`ramet bench denoise` on a small model: it runs, and the cost model is the reference's."""

from __future__ import annotations

import argparse

import pytest

from loadgen.micro import bench_denoise
from server.cli import main
from tests.runtime.reuse.bicache.models import save_tiny


def arguments(**options):
    parser = argparse.ArgumentParser()
    bench_denoise.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **options})


def test_the_cost_model():
    """r = 0.88, d = 17 of 32 layers, 128 steps, R = 16."""
    cases = bench_denoise._cases(arguments(depth=17), 32)
    assert [case.cost(8, 120, 0.88) for case in cases] == pytest.approx([128, 22.4, 18.66, 22.4, 15.36], abs=0.01)


def test_it_runs(default_model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = save_tiny("llama_diffusion", tmp_path / "tiny", tokenizer_from=default_model_dir)
    options = "--prefix 32 --gen-length 8 --steps 4 --refresh-interval 2 --depth 2 --repeat 1 --dtype float32"
    assert main(["bench", "denoise", "--model", str(path), *options.split(" ")]) == 0
    out = capsys.readouterr().out
    assert "56 rows, 57.1% shared, 4 steps, 2 refreshes" in out
    assert out.count("BiCache, d = 2") == 3
    assert main(["bench", "denoise", "--model", str(default_model_dir), "--repeat", "1"]) == 1
