"""`ramet bench gpu`, tried on a CPU with tiny models: its shape, not its figures."""

import pytest
import torch

from loadgen.gpu.bench_gpu import Gpu
from loadgen.gpu.gaps import busy_and_rests
from loadgen.gpu.shapes import SHAPES, write_shape
from loadgen.gpu.watched import WatchedDrive
from loadgen.harness import BenchError
from runtime.models.spec import LlamaSpec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    with pytest.raises(BenchError, match="torch finds no CUDA device"), Gpu().session():
        pass


def test_tokens_are_the_same_on_every_path(measured, tiny_dir, monkeypatch):
    monkeypatch.setattr("loadgen.gpu.correctness._NEW", 6)
    rows = measured("gpu", "--device", "cpu", "--model", tiny_dir, "--parts", "tokens", "pairs")
    (float32,) = (row for row in rows if row.get("engine") == "float32")
    assert float32["theirs"] == float32["warm"] == 1.0
    assert [row["same"] for row in rows if row["part"] == "pairs"] == [1.0] * 3
    (shared,) = (row for row in rows if row.get("engines") == "shared pages read once, by each")
    assert shared["sharing"] > 0


def test_every_speed_is_measured(measured):
    parts = ("bounds", "decode", "shared prefix", "first token", "prefill")
    rows = measured("gpu", "--device", "cpu", "--parts", *parts)
    assert {row["part"] for row in rows} == set(parts)
    assert len({row["mode"] for row in rows if row["part"] == "decode"}) == 4
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
        spec = LlamaSpec.load(write_shape(name, tmp_path))
        assert (spec.diffusion is None) == name.startswith("llama")
    spec = LlamaSpec.load(tmp_path / "llama-8b")
    billions = sum(torch.Size(shape).numel() for shape in spec.expected_tensors().values()) / 1e9
    assert 8.02 < billions < 8.04


def test_rests_of_a_device_are_what_no_operation_covers():
    assert busy_and_rests([(5, 7), (0, 2), (1, 3), (6, 6.5), (9, 10)]) == (6, [2, 2])
    assert busy_and_rests([]) == (0, [])
