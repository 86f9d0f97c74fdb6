"""`ramet bench step` on a small model: its parts, adapters, other builds, and the engine core that benches drive."""

import weakref

import pytest

from loadgen.experiments.micro.bench_step import PARTS, Step
from loadgen.harness import BenchError
from loadgen.offline.drive import ClockedDrive, Drive, matrix_weights
from runtime.execution.native.library import load_best
from runtime.models.spec import DecoderSpec

SMALL = ["--shared", "64", "--steps", "2", "--prompts", "40", "--rank", "2"]
ENGINE = ["--engine", "dtype=float32", "threads=1"]


@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_every_part_is_measured(measured, tiny_dir, drafts):
    before = vars(load_best())["decoder_forward"] if load_best() else None
    found = measured("step", "--model", tiny_dir, *SMALL, "--batches", 1, 3, *ENGINE, f"drafts={drafts}")
    *steps, prompt = found
    assert [(one["choice"], one["requests"]) for one in steps] == [
        (choice, batch) for choice in ("greedy", "drawn", "top-p") for batch in (1, 3)
    ]
    for one in steps:
        assert min(one["plan"], one["sampling"], one["booking"], one["cpu"]) > 0
        assert (one["drafts"] > 0) == (drafts == "auto")
        assert one["step"] >= max(one[part] for part in PARTS)
        assert one["rate"] == pytest.approx(one["requests"] / one["step"])
    assert prompt["cached"] > 0
    assert prompt["rate"] == pytest.approx(40 / prompt["ttft"])
    assert before == (vars(load_best())["decoder_forward"] if load_best() else None)


def test_code_builds_and_adapters_take_turns(measured, tiny_dir):
    if (library := load_best()) is None:
        pytest.skip("the native kernels were not built")
    options = ["--batches", 1, 2, "--choices", "greedy", "--adapters", 0, 1, 2, "--code", "native", "torch"]
    found = measured("step", "--model", tiny_dir, *SMALL, *options, f"other={library.path}", *ENGINE)
    assert [one["code"] for one in found] == ["native"] * 5 + ["torch"] * 5 + ["other"] * 5 + [
        code for code in ("native", "torch", "other") for _ in "12"
    ]
    assert [(one["adapters"], one.get("requests")) for one in found[:5]] == [(0, 1), (1, 1), (0, 2), (1, 2), (2, 2)]
    assert [one.get("host") is None for one in found[:15]] == [
        code == "torch" for code in ("native", "torch", "other") for _ in range(5)
    ]


@pytest.mark.parametrize(
    ("option", "reason"),
    [("code=other=/nowhere.so", "/nowhere.so"), ("code=none", "none is none of"), ("engine=fast=1", "no such option")],
)
def test_builds_and_options_that_do_not_exist_are_refused(tiny_dir, option, reason):
    name, _, value = option.partition("=")
    with pytest.raises(BenchError, match=reason), Step(model=str(tiny_dir), **{name: (value,)}).session():
        pass


def test_a_closed_drive_keeps_no_memory(tiny_dir):
    drive = ClockedDrive(tiny_dir, device="cpu", dtype="float32", kernels="torch", pool_tokens=256)
    drive.clock(drive.core, "_book", "part")
    drive.clock(drive.core.executor, "run", "part")
    drive.tokens([[5, 6, 7]], 2)
    pool = weakref.ref(drive.core.executor.pool.k)
    drive.close()
    assert pool() is None, "a GPU has no room for the next engine"


@pytest.mark.parametrize("measure", ["step", "first_tokens", "finish"])
def test_a_failed_request_is_no_measurement(tiny_dir, monkeypatch, measure):
    """It would be the fastest of all."""
    drive = Drive(tiny_dir, device="cpu", dtype="float32", kernels="torch", pool_tokens=256)
    try:
        drive.add(drive.text(8), 4)
        with monkeypatch.context() as patched:
            patched.setattr(drive.core.executor, "run", lambda batch: 1 // 0)
            with pytest.raises(BenchError, match=r"^request 1 failed \(error\): "):
                getattr(drive, measure)()
        with pytest.raises(BenchError, match=r"^request 2 failed \(error\): "):
            drive.add(drive.text(8), 1 << 20)
        drive.add(drive.text(8), 2)
        drive.finish()
    finally:
        drive.close()


def test_matrix_weights_are_those_of_the_checkpoint(tiny_dir):
    spec = DecoderSpec.load(tiny_dir)
    shapes = spec.expected_tensors().values()
    body = sum(rows * columns for rows, *rest in shapes for columns in rest if rows != spec.vocab_size)
    assert matrix_weights(spec) == (body, spec.vocab_size * spec.hidden_size)
