"""Sizing of weights and pools, and pools of half the size."""

import pytest
import torch

from runtime.config import CacheConfig, ModelConfig, make_config
from runtime.errors import ModelError
from runtime.execution import flashinfer_package
from runtime.execution.device import choose_attention
from runtime.execution.flashinfer_package import VERSION
from runtime.execution.sizing import check_weights, pool_pages
from runtime.models.spec import DecoderSpec
from runtime.models.weights import random_weights
from runtime.offline import Engine
from runtime.opening import open_engine

CUDA = torch.device("cuda")


@pytest.fixture
def memory(monkeypatch):
    def free(free_gib: float, total_gib: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free_gib * 2**30), int(total_gib * 2**30)))

    return free


def test_weights_that_do_not_fit_are_refused(tiny_dir, memory):
    spec = DecoderSpec.load(tiny_dir)
    count = sum(torch.Size(shape).numel() for shape in spec.expected_tensors().values())
    gib = 2 * count / 2**30
    memory(1.01 * gib, 1.0)
    check_weights(spec, torch.bfloat16, CUDA)
    memory(0.99 * gib, 1.0)
    with pytest.raises(ModelError, match=r"weights take 0\.0 GiB of cuda, .* raise --tensor-parallel"):
        check_weights(spec, torch.bfloat16, CUDA)
    check_weights(spec, torch.bfloat16, CUDA, num_ranks=2)


def test_memory_that_torch_keeps_for_later_is_free(memory, monkeypatch):
    memory(1.0, 20.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: memory(7.0, 20.0))
    assert pool_pages(CacheConfig(page_size=16), 1 << 20, CUDA) == 4 * 1024 // 16


def test_the_pool_takes_what_the_weights_leave_of_a_gpu_or_what_it_is_told(memory):
    memory(7.0, 20.0)
    assert pool_pages(CacheConfig(page_size=16), 1 << 20, CUDA) == 4 * 1024 // 16
    memory(1.0, 8.0)
    with pytest.raises(ModelError, match="the KV pool would hold 0 tokens"):
        pool_pages(CacheConfig(), 1 << 20, CUDA)
    assert pool_pages(CacheConfig(pool_memory=0.5, page_size=16), 1 << 20, CUDA) == 512 // 16


def test_fp8_halves_the_pool_and_serves(tiny_dir):
    options = {"model": str(tiny_dir), "device": "cpu", "dtype": "bfloat16", "pool_memory": 0.01}
    tokens = {}
    for kv_dtype in ("auto", "fp8"):
        with Engine(config=make_config(**options, kv_dtype=kv_dtype, kernels="torch")) as engine:
            assert engine.core.executor.pool.k.dtype.itemsize == (2 if kv_dtype == "auto" else 1)
            tokens[kv_dtype] = engine.info.pool_tokens
            cold, warm = (
                engine.generate("Once upon a time", {"max_new_tokens": 4, "temperature": 0}) for _ in range(2)
            )
            assert cold[0].token_ids == warm[0].token_ids
    assert tokens["fp8"] >= 2 * tokens["auto"]


def test_random_weights_need_no_checkpoint(tiny_dir, tmp_path):
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    options = {"random_weights": True, "kernels": "torch", "pool_tokens": 64, "device": "cpu", "dtype": "float32"}
    core = open_engine(make_config(model=str(tmp_path), **options), tmp_path)
    spec = core.executor.spec
    first, again = (random_weights(spec, torch.float32, torch.device("cpu")) for _ in range(2))
    assert first.keys() == spec.expected_tensors().keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"pool_memory": 1e6}, "this machine has"), ({"depth_table": "t.json"}, "--depth-table: .* is a causal model")],
)
def test_options_that_cannot_be_are_refused_before_the_weights_are_read(tiny_dir, tmp_path, options, said):
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())  # and no weights
    with pytest.raises(ModelError, match=said):
        open_engine(make_config(model=str(tmp_path), device="cpu", dtype="float32", **options), tmp_path)


def test_flashinfer_is_taken_where_it_can_compute(monkeypatch):
    asked = ModelConfig(kernels="flashinfer")
    with pytest.raises(ModelError, match="needs CUDA"):
        choose_attention(asked, torch.device("cpu"), torch.bfloat16, 64)
    monkeypatch.setattr(flashinfer_package, "find_spec", lambda name: None)
    assert choose_attention(ModelConfig(), CUDA, torch.bfloat16, 64) == "torch"
    with pytest.raises(ModelError, match="FlashInfer is missing"):
        choose_attention(asked, CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(flashinfer_package, "find_spec", lambda name: name)
    for found in ("0.6.14", "0.7.2.post1"):
        monkeypatch.setattr(flashinfer_package, "version", lambda name, found=found: found)
        assert choose_attention(ModelConfig(), CUDA, torch.bfloat16, 64) == "torch"
        with pytest.raises(ModelError, match=rf"FlashInfer {found} is installed, and Ramet calls {VERSION}: `make"):
            choose_attention(asked, CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(flashinfer_package, "version", lambda name: f"{VERSION}+cu130")
    assert choose_attention(ModelConfig(), CUDA, torch.bfloat16, 64) == "flashinfer"
    for dtype, head_dim, said in ((torch.float32, 64, "no float32"), (torch.bfloat16, 80, "heads of 64, 128 or 256")):
        assert choose_attention(ModelConfig(), CUDA, dtype, head_dim) == "torch"
        with pytest.raises(ModelError, match=said):
            choose_attention(asked, CUDA, dtype, head_dim)


def test_a_pool_that_the_machine_cannot_hold_is_refused():
    cpu = torch.device("cpu")
    for options in ({"pool_memory": 1e6}, {"pool_tokens": 1 << 40}):
        with pytest.raises(ModelError, match=r"GiB.*this machine has.*--pool-tokens or --pool-memory"):
            pool_pages(CacheConfig(**options), 1 << 20, cpu)
    assert pool_pages(CacheConfig(pool_memory=0.5, page_size=16), 1 << 20, cpu) == 512 // 16
