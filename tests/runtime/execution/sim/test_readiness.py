"""Before the engine is ready, FlashInfer has loaded its kernels and computed each kind of step; else torch serves."""

import logging
import sys

import pytest
import torch

from runtime.errors import EngineDead, ModelError
from runtime.execution import flashinfer_package
from runtime.execution.flashinfer_package import COST, VERSION
from runtime.execution.ops import Ops
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.engines import Engine, draw
from tests.runtime.execution.sim.package import Package

OPTIONS = {"cuda_graph_batches": "1,4,64", "max_running": 4}
NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/root/.cache/flashinfer'
[1/3] c++ -O3 -c norm_jit_binding.cu
/usr/include/flashinfer/gemm.h:17:10: fatal error: cublasLt.h: No such file or directory
compilation terminated.
"""


@pytest.fixture
def llama(saved):
    return saved("Llama")


def no_compiler(name):
    raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")


def broken_compiler(name):
    if name == "gen_norm_module":
        raise RuntimeError(NINJA)


def no_libraries(name):
    if name == "gen_batch_decode_module":
        raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")


def built_by(build):
    return lambda monkeypatch: Package(build=build).install(monkeypatch)


def of_version(version):
    return lambda monkeypatch: Package(version=version).install(monkeypatch)


def missing(monkeypatch):
    monkeypatch.setattr(flashinfer_package, "find_spec", lambda name: None)


def not_importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.jit.rope", None)


def replaced(name, function):
    return lambda monkeypatch: monkeypatch.setattr(sys.modules["flashinfer"], name, function)


def without_mask(monkeypatch):
    """As a kernel that takes no notice of the mask, which other kinds of steps do not have."""
    made = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper

    def wrapper(*args, **options):
        found = made(*args, **options)
        plan = found.plan
        found.plan = lambda *given, custom_mask=None, **rest: plan(*given, **rest)
        return found

    monkeypatch.setattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper", wrapper)


def only_of_rows(x, weight, eps):
    return Ops().rms_norm(x, weight, eps) if x.dim() == 2 else x


FAULTS = {
    "no compiler": (built_by(no_compiler), "the kernels for norm (Could not find nvcc"),
    "a broken compiler": (built_by(broken_compiler), "gemm.h:17:10: fatal error: cublasLt.h"),
    "no library": (built_by(no_libraries), "kernels for decode, bfloat16, heads of 64 (libcudart.so.13"),
    "a later version": (of_version("0.7.2.post1"), f"FlashInfer 0.7.2.post1 is installed, and Ramet calls {VERSION}"),
    "an earlier version": (of_version("0.6.14"), "FlashInfer 0.6.14 is installed"),
    "no FlashInfer": (missing, "FlashInfer is missing: `make extra-cuda`"),
    "an import": (
        not_importable,
        "its import (import of flashinfer.jit.rope halted; None in sys.modules). `make extra-cuda`",
    ),
    "no numbers": (replaced("rmsnorm", lambda x, weight, eps: x * torch.nan), "norms (results differ from torch's by"),
    "a wrong norm of heads": (replaced("rmsnorm", only_of_rows), "norms (results differ from torch's by"),
    "a wrong mask": (without_mask, "a masked step (results differ from torch's by"),
}


def test_kernels_are_loaded_and_graphs_captured_before_the_engine_is_ready(llama, device, monkeypatch, caplog):
    package = Package(version=f"{VERSION}+cu130")
    package.install(monkeypatch)
    caplog.set_level(logging.INFO, "ramet.engine")
    engine = Engine(device, llama, **OPTIONS)
    assert (engine.core.info.attention_backend, engine.core.info.attention_note) == ("flashinfer", "")
    assert len(package.built) == len(set(package.built)) == 8
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    graphs = engine.core.executor.decoder.graphs._graphs
    sizes = {kind: {shape.rows.size for shape in graphs if shape.rows.decodes == kind} for kind in (True, False)}
    assert sizes == {True: {1, 4}, False: {64, 128}}, "no more rows than requests run, or than a step has"
    assert "captured 7 CUDA graphs, 3 of decode steps and 4 of steps with prompts, in" in caplog.text
    monkeypatch.setattr("runtime.execution.graphs.capture", lambda *_: pytest.fail("captured while a request waits"))
    assert engine.together([draw(i, 20) for i in range(3)], max_new_tokens=6)
    assert engine.core.counters["failed_steps"] == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_fails_is_said_on_one_line_and_torch_serves(llama, device, monkeypatch, caplog, fault):
    cause, said = FAULTS[fault]
    cause(monkeypatch)
    engine = Engine(device, llama, **OPTIONS)
    info = engine.core.info
    assert info.attention_backend == "torch"
    assert said in info.attention_note
    assert COST[1:] in info.attention_note
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "FlashInfer" in r.getMessage()]
    assert lines == [f"torch computes attention, not FlashInfer: {info.attention_note}"]
    assert "\n" not in lines[0]
    prompts = [draw(i, 20 + i) for i in range(3)]
    found = engine.together(prompts, max_new_tokens=6, temperature=0)
    assert all(len(tokens) == 6 for tokens in found)
    assert engine.core.counters["failed_steps"] == 0


@pytest.mark.parametrize("kind", ["Prefill", "Decode"])
def test_windows_are_tried_for_models_that_have_them(device, saved, monkeypatch, kind):
    """Kernels that take no notice of the window."""
    name = f"Batch{kind}WithPagedKVCacheWrapper"
    made = getattr(sys.modules["flashinfer"], name)

    def wrapper(*args, **options):
        found = made(*args, **options)
        plan = found.plan
        found.plan = lambda *given, window_left, **rest: plan(*given, **rest)
        return found

    monkeypatch.setattr(sys.modules["flashinfer"], name, wrapper)
    info = Engine(device, saved("Mistral"), **OPTIONS).core.info
    assert f"a windowed {kind.lower()} step (results differ" in info.attention_note
    assert Engine(device, saved("Llama"), **OPTIONS).core.info.attention_backend == "flashinfer"


def test_a_backend_that_is_asked_for_by_name_is_had_or_refused(llama, device, monkeypatch):
    FAULTS["a broken compiler"][0](monkeypatch)
    with pytest.raises(
        ModelError, match=r"^--kernels flashinfer: FlashInfer fails at the kernels for norm \(.*cublasLt"
    ):
        Engine(device, llama, kernels="flashinfer", **OPTIONS)
    engine = Engine(device, llama, kernels="torch", **OPTIONS)
    assert engine.core.info.attention_note.startswith("--kernels torch. ")


def test_torch_gives_the_tokens_of_the_host_in_float32(llama, device):
    prompts = [draw(i, 20 + i) for i in range(4)]
    engine = Engine(device, llama, dtype="float32", **OPTIONS)
    assert engine.core.info.attention_backend == "torch"
    assert "FlashInfer has no float32" in engine.core.info.attention_note
    found = engine.together(prompts, max_new_tokens=8)
    assert found == Driver(make_core(llama, kernels="torch")).together(prompts, max_new_tokens=8)


def test_steps_run_without_graphs_that_cannot_be_captured(llama, device, monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("runtime.execution.graphs.capture", fails)
    engine = Engine(device, llama, **OPTIONS)
    assert engine.core.info.attention_backend == "flashinfer"
    assert "run without CUDA graphs, which cannot be captured: operation not permitted" in caplog.text
    assert all(len(tokens) == 4 for tokens in engine.together([draw(1, 20), draw(2, 9)], max_new_tokens=4))


def test_a_graph_that_cannot_be_captured_fails_no_request(llama, device, monkeypatch, caplog):
    engine = Engine(device, llama, **OPTIONS)
    graphs = engine.core.executor.decoder.graphs
    graphs._graphs.clear()  # as for a shape that was not captured before the engine was ready
    tried = []

    def fails(*_):
        tried.append(0)
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr("runtime.execution.graphs.capture", fails)
    found = engine.together([draw(1, 20), draw(2, 9)], max_new_tokens=6)
    assert [len(tokens) for tokens in found] == [6, 6]
    assert (engine.core.counters["failed_steps"], engine.core.counters["failed_requests"]) == (0, 0)
    assert "which cannot be captured: no memory for a graph" in caplog.text
    assert len(tried) == len(graphs._refused), "each shape is tried once"
    assert not graphs._graphs


def test_a_graph_that_fails_with_the_device_ends_the_step(llama, device, monkeypatch):
    engine = Engine(device, llama, **OPTIONS)
    engine.core.executor.decoder.graphs._graphs.clear()
    lost = RuntimeError("an illegal memory access was encountered")

    def fails(*_):
        raise lost

    monkeypatch.setattr("runtime.execution.graphs.capture", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(EngineDead, match="cannot be used any more"):
        engine.together([draw(1, 20)], max_new_tokens=6)
