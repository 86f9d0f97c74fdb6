"""`ramet bench gpu`, tried on a CPU with tiny models: its shape, not its figures."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from loadgen.__main__ import main
from loadgen.gpu.gaps import busy_and_rests
from loadgen.gpu.records import Records, markdown
from loadgen.gpu.shapes import SHAPES, write_shape
from runtime.models.spec import ModelSpec


@pytest.fixture
def bench(monkeypatch, tmp_path):
    def call(*arguments) -> tuple[int, dict]:
        monkeypatch.setattr(sys, "argv", ["loadgen", "gpu", *map(str, arguments), "--out", str(tmp_path)])
        code = main()
        part = tmp_path / f"gpu-{arguments[0]}.json"
        return code, json.loads(part.read_text()) if part.exists() else {}

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(bench, capsys):
    assert bench("speed") == (2, {})
    assert capsys.readouterr().err == "ramet bench: gpu: torch finds no CUDA device\n"
    assert bench("sped") == (2, {})


def test_correctness(bench, tiny_dir):
    code, found = bench("correctness", "--device", "cpu", "--model", tiny_dir)
    assert code == 0
    float32 = found["figures"]["greedy tokens in float32"]
    assert float32["as transformers"] == float32["cached as uncached"] == 1.0
    assert found["figures"].keys() == {"greedy tokens in float32", "greedy tokens in bfloat16"}
    assert found["about"]["command"].startswith("ramet gpu correctness")


def test_speed_goes_on_where_it_was_ended(bench, capsys, tmp_path):
    code, found = bench("speed", "--device", "cpu", "--limit", "0")
    assert code == 3
    assert found == {}
    code, found = bench("speed", "--device", "cpu")
    assert code == 0
    figures = found["figures"]
    assert {"cold, ms", "warm, ms"} <= figures["warm and cold"].keys()
    assert "plain over cascade" in figures["3 behind 64 shared"]
    for name, row in figures.items():
        assert ("host time hidden, %" in row) == name.endswith("one step ahead")
        assert all(value > 0 for figure, value in row.items() if figure != "host time hidden, %")
    table = (tmp_path / "gpu-speed.md").read_text()
    assert all(f"| {name} |" in table for name in figures)
    capsys.readouterr()
    assert bench("speed", "--device", "cpu") == (0, found)
    assert capsys.readouterr().out == ""


def test_bicache(bench):
    code, found = bench("bicache", "--device", "cpu")
    assert code == 0
    figures = found["figures"]
    assert len(figures) == 6
    assert figures["32 shared, batch 2: naive"]["depth"] == 4
    assert figures["32 shared, batch 2: no cache"]["gain, %"] == 0
    by_rows = [figures[f"32 shared, batch 2: {name}"]["gain by rows, %"] for name in ("d = 0", "BiCache", "naive")]
    assert by_rows == sorted(by_rows)


def test_server(bench, default_model_dir):
    code, found = bench("server", "--device", "cpu", "--tokenizer", default_model_dir)
    assert code == 0
    (figures,) = found["figures"].values()
    assert figures["completed"] == figures["requests"] > 0


def test_shapes_are_models_we_know(tmp_path):
    for name in SHAPES:
        spec = ModelSpec.load(write_shape(name, tmp_path))
        assert (spec.diffusion is None) == name.startswith("llama")
    spec = ModelSpec.load(tmp_path / "llama-8b")
    billions = sum(torch.Size(shape).numel() for shape in spec.expected_tensors().values()) / 1e9
    assert 8.02 < billions < 8.04


def test_tables_begin_anew_where_columns_change():
    text = markdown({"date": "today"}, {"a": {"x": 1.0}, "b": {"x": 0.123456}, "c": {"y": "z"}})
    assert text == (
        "- date: today\n\n| | x |\n| --- | --- |\n| a | 1 |\n| b | 0.1235 |\n\n| | y |\n| --- | --- |\n| c | z |\n"
    )


def test_what_fails_leaves_what_was_measured(tmp_path):
    def fail() -> dict:
        raise RuntimeError("no")

    records = Records(tmp_path / "a.json", {})
    with pytest.raises(RuntimeError, match="no"):
        records.measure([("a", lambda: {"x": 1}), ("b", fail)], 60)
    assert Records(tmp_path / "a.json", {}).figures == {"a": {"x": 1}}


def test_rests_of_a_device_are_what_no_operation_covers():
    assert busy_and_rests([(5, 7), (0, 2), (1, 3), (6, 6.5), (9, 10)]) == (6, [2, 2])
    assert busy_and_rests([]) == (0, [])
