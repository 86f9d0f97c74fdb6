"""`ramet bench gpu`, tried on a CPU with tiny models: its shape, not its figures."""

import json
import shutil

import pytest
import torch

from loadgen.experiments.gpu import correctness
from loadgen.experiments.gpu.bench_gpu import Gpu
from loadgen.experiments.gpu.gaps import busy_and_rests
from loadgen.experiments.gpu.kernel_times import longest
from loadgen.experiments.gpu.shapes import SHAPES, write_shape
from loadgen.experiments.gpu.speed import share_of
from loadgen.experiments.gpu.steps import STEPS
from loadgen.experiments.gpu.watched import WatchedDrive
from loadgen.harness import BenchError
from runtime.models.spec import DecoderSpec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(BenchError, match="torch finds no CUDA device"), Gpu().session():
        pass


def test_tokens_are_the_same_on_every_path(measured, tiny_dir, monkeypatch):
    monkeypatch.setattr("loadgen.experiments.gpu.correctness._NEW", 6)
    rows = measured("gpu", "--device", "cpu", "--model", tiny_dir, "--parts", "tokens", "pairs")
    (float32,) = (row for row in rows if row.get("engine") == "float32")
    assert float32["theirs"] == float32["warm"] == 1.0
    assert [row["same"] for row in rows if row["part"] == "pairs"] == [1.0] * 3
    (shared,) = (row for row in rows if row.get("engines") == "shared pages read once, by each")
    assert shared["sharing"] > 0


def test_no_token_ends_a_comparison(tiny_dir, tmp_path, monkeypatch):
    """Neither does transformers avoid the model's end token, nor stop behind it."""
    monkeypatch.setattr(correctness, "_NEW", 6)
    options = {"dtype": "float32"}
    cold, _, _ = correctness._ours(tiny_dir, {"device": "cpu", **options}, correctness._prompts(tiny_dir))
    path = shutil.copytree(tiny_dir, tmp_path / "model")
    for file in ("config.json", "generation_config.json"):
        whole = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(whole | {"eos_token_id": cold[0][2]}))
    assert correctness.greedy(path, "cpu", options)["theirs"] == 1


def test_families_are_compared(measured, monkeypatch):
    """One of them; the rehearsal of the lease compares all."""
    monkeypatch.setattr(correctness, "_NEW", 6)
    (row,) = measured("gpu", "--device", "cpu", "--parts", "families", "--only", "family=LFM2")
    assert row["theirs"] == row["warm"] == 1


def test_a_share_above_all_is_an_error():
    assert share_of(0.5, 2.0) == 0.25
    with pytest.raises(RuntimeError, match=r"0\.500000 s, which is 300% of what the device allows"):
        share_of(1.5, 0.5)


def test_times_are_summed_by_name():
    found = longest([("a", 4.0), ("b" * 300, 9.0), ("a", 2.0)], steps=2, most=9)
    assert found == [{"name": "b" * 200, "us": 4.5, "count": 0.5}, {"name": "a", "us": 3.0, "count": 1.0}]
    assert [one["name"] for one in longest([("a", 1.0), ("b", 2.0)], 1, most=1)] == ["b"]


def test_every_speed_is_measured(measured):
    parts = ("bounds", "decode", "shared prefix", "first token", "steps", "prefill")
    rows = measured("gpu", "--device", "cpu", "--parts", *parts)
    assert {row["part"] for row in rows} == set(parts)
    assert len({row["mode"] for row in rows if row["part"] == "decode"}) == 4
    steps = [row for row in rows if row["part"] == "steps"]
    assert [row["steps"] for row in steps] == list(STEPS)
    for row in steps:
        assert row["kernels"] == sorted(row["kernels"], key=lambda one: -one["us"])
        assert {"aten::mm", "aten::addmm"} <= {one["name"] for one in row["kernels"]}
        del row["kernels"], row["calls"], row["steps"]
    for row in rows:
        assert {"copy", "step", "cached", "share"} & row.keys()
        values = [value for name, value in row.items() if name not in ("part", "mode", "kernels", "graphs", "sharing")]
        assert all(number > 0 for value in values for number in (value if isinstance(value, list) else [value]))

    shared = {row["mode"]: row["sharing"] for row in rows if row["part"] == "shared prefix"}
    assert shared == {"default": 1, "no cascade": 0, "eager": 1, "eager, no cascade": 0}


def test_only_some_cells(measured):
    rows = measured("gpu", "--device", "cpu", "--parts", "decode", "bounds", "--only", "mode=eager", "requests=3")
    assert [(row["part"], row.get("mode"), row.get("requests")) for row in rows] == [
        ("decode", "eager", 3),
        ("bounds", None, None),
    ]


def test_another_path_than_the_one_asked_for_is_an_error(tiny_dir):
    drive = WatchedDrive(tiny_dir, device="cpu", kernels="torch", dtype="float32", pool_tokens=256)
    try:
        drive.tokens([[5, 6, 7]] * 2, 3)
        assert drive.seen["steps"] > 1
        drive.demand("sharing", wanted=False)
        drive.demand_backend()
        with pytest.raises(RuntimeError, match=r"graphs: 0 of \d steps, where some should be"):
            drive.demand("graphs", wanted=True)
        drive.core.executor.device, drive.core.executor.dtype = torch.device("cuda"), torch.bfloat16
        with pytest.raises(RuntimeError, match="the attention backend is torch, where flashinfer should be"):
            drive.demand_backend()
        drive.core.executor.device = torch.device("cpu")
    finally:
        drive.close()


def test_shapes_are_models_we_know(tmp_path):
    for name in SHAPES:
        spec = DecoderSpec.load(write_shape(name, tmp_path))
        assert spec.causal == name.startswith("llama")
    spec = DecoderSpec.load(tmp_path / "llama-8b")
    billions = sum(torch.Size(shape).numel() for shape in spec.expected_tensors().values()) / 1e9
    assert 8.02 < billions < 8.04


def test_rests_of_a_device_are_what_no_operation_covers():
    assert busy_and_rests([(5, 7), (0, 2), (1, 3), (6, 6.5), (9, 10)]) == (6, [2, 2])
    assert busy_and_rests([]) == (0, [])
