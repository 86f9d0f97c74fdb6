"""`ramet bench gpu`, tried on a CPU with tiny models: its shape, not its figures."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from loadgen.__main__ import main
from loadgen.gpu.figures import markdown, measure
from loadgen.gpu.gaps import busy_and_rests
from loadgen.gpu.shapes import SHAPES, write_shape
from runtime.errors import ModelError
from runtime.models.spec import LlamaSpec


def recorded(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["of"]: line["outcome"] for line in lines if "of" in line}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    def call(*arguments) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "argv", ["loadgen", "gpu", *map(str, arguments), "--out", str(tmp_path)])
        code = main()
        return code, recorded(tmp_path / f"gpu-{arguments[0]}.jsonl")

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(bench, capsys):
    assert bench("speed") == (2, {})
    assert capsys.readouterr().err == "ramet bench: gpu: torch finds no CUDA device\n"
    assert bench("sped") == (2, {})


def test_correctness(bench, tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("loadgen.gpu.correctness._NEW", 6)
    code, figures = bench("correctness", "--device", "cpu", "--model", tiny_dir)
    assert code == 0
    float32 = figures["greedy tokens in float32"]
    assert float32["as transformers"] == float32["cached as uncached"] == 1.0
    pairs = {name: row for name, row in figures.items() if "cold" in row}
    assert pairs.keys() == {
        "greedy tokens one step ahead as in step",
        "greedy tokens shared pages read once as by each",
        "greedy tokens pages of 1 as of 16",
    }
    assert all(row["cold"] == row["warm"] == 1.0 for row in pairs.values())
    assert figures.keys() - pairs.keys() == {"greedy tokens in float32", "greedy tokens in bfloat16"}
    page = (tmp_path / "gpu.md").read_text()
    assert "| tokens one step ahead | at least 1 | 1 | met |" in page
    assert "| plain over cascade, 32 requests | at least 1.3 | | not measured |" in page
    assert "- command: ramet gpu correctness" in (tmp_path / "gpu-correctness.md").read_text()


def test_speed_goes_on_where_it_was_ended(bench, capsys, tmp_path):
    assert bench("speed", "--device", "cpu", "--limit", "0") == (3, {})
    code, figures = bench("speed", "--device", "cpu")
    assert code == 0
    assert {"cold, ms", "warm, ms"} <= figures["warm and cold"].keys()
    assert "plain over cascade" in figures["3 behind 64 shared"]
    for name, row in figures.items():
        assert ("host time hidden, %" in row) == name.endswith("one step ahead")
        assert all(value > 0 for figure, value in row.items() if figure != "host time hidden, %")
    table = (tmp_path / "gpu-speed.md").read_text()
    assert all(f"| {name} |" in table for name in figures)
    capsys.readouterr()
    assert bench("speed", "--device", "cpu") == (0, figures)
    assert capsys.readouterr().out == ""


def test_bicache(bench):
    code, figures = bench("bicache", "--device", "cpu")
    assert code == 0
    assert len(figures) == 8
    assert figures["32 shared, batch 2: naive"]["depth"] == 4
    assert figures["32 shared, batch 2: no cache"]["gain, %"] == 0
    by_rows = [figures[f"32 shared, batch 2: {name}"]["gain by rows, %"] for name in ("d = 0", "BiCache", "naive")]
    assert by_rows == sorted(by_rows)


@pytest.mark.parametrize(("part", "count"), [("modules", 2), ("documents", 5), ("drafts", 1)])
def test_reuse_beyond_prefixes(bench, default_model_dir, part, count):
    code, figures = bench(part, "--device", "cpu", "--tokenizer", default_model_dir)
    assert code == 0
    assert len(figures) == count
    assert all(value > 0 for row in figures.values() for name, value in row.items() if name != "right of drafted, %")


def test_server(bench, default_model_dir):
    code, found = bench("server", "--device", "cpu", "--tokenizer", default_model_dir)
    assert code == 0
    (figures,) = found.values()
    assert figures["completed"] == figures["count"] > 0


def test_shapes_are_models_we_know(tmp_path):
    for name in SHAPES:
        spec = LlamaSpec.load(write_shape(name, tmp_path))
        assert (spec.diffusion is None) == name.startswith("llama")
    spec = LlamaSpec.load(tmp_path / "llama-8b")
    billions = sum(torch.Size(shape).numel() for shape in spec.expected_tensors().values()) / 1e9
    assert 8.02 < billions < 8.04


def test_tables_begin_anew_where_columns_change():
    text = markdown({"date": "today"}, {"a": {"x": 1.0}, "b": {"x": 0.123456}, "c": {"y": "z"}})
    assert text == (
        "- date: today\n\n| | x |\n| --- | ---: |\n| a | 1 |\n| b | 0.1235 |\n\n| | y |\n| --- | ---: |\n| c | z |\n"
    )


def test_what_fails_leaves_what_was_measured(tmp_path):
    def fail() -> dict:
        raise RuntimeError("no")

    path = tmp_path / "a.jsonl"
    with pytest.raises(RuntimeError, match="no"):
        measure(path, [("a", lambda: {"x": 1}), ("b", fail)], 60, {"device": "this"})
    assert recorded(path) == {"a": {"x": 1}}
    with pytest.raises(ModelError, match="remove it to begin anew"):
        measure(path, [], 60, {"device": "another"})


def test_rests_of_a_device_are_what_no_operation_covers():
    assert busy_and_rests([(5, 7), (0, 2), (1, 3), (6, 6.5), (9, 10)]) == (6, [2, 2])
    assert busy_and_rests([]) == (0, [])
