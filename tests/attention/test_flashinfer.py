"""FlashInfer: our calls against its real signatures where it is installed, and its results where there is a GPU."""

import inspect

import numpy as np
import pytest
import torch

from runtime.attention.cpu import CPUAttention
from runtime.batch import AttentionPlan, Span
from runtime.kv.pool import KVPool
from runtime.models.ops import FlashInferOps, Ops
from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import RopeSpec

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed (pip install ramet[cuda])")

HEADS, KV_HEADS, DIM = 8, 2, 64


class Recorder:
    """Takes a wrapper's place and binds every call to the real class's signatures."""

    def __init__(self, real: type, calls: list):
        self.real, self.calls = real, calls

    def __call__(self, *args, **kwargs):
        inspect.signature(self.real).bind(*args, **kwargs)
        return self

    def plan(self, *args, **kwargs):
        bound = inspect.signature(self.real.plan).bind(self, *args, **kwargs)
        self.calls.append((self.real.__name__, bound.arguments))


@pytest.fixture
def recorded(monkeypatch):
    from runtime.attention.flashinfer import FlashInferAttention

    calls: list = []
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        monkeypatch.setattr(flashinfer, name, Recorder(getattr(flashinfer, name), calls))
    pool = KVPool(1, 30, 4, KV_HEADS, DIM, torch.bfloat16, torch.device("cpu"))
    rope = RotaryEmbedding(RopeSpec(theta=10000.0), DIM, torch.device("cpu"))
    return FlashInferAttention(pool, rope, HEADS), calls


def span(length: int, first: int, **options) -> Span:
    return Span(np.arange(first, first + -(-length // 4), dtype=np.int32), length, **options)


def test_decode_batch_is_one_direct_decode_call(recorded):
    backend, calls = recorded
    plan = AttentionPlan(2)
    plan.add(slice(0, 1), span(9, 0), "causal")
    plan.add(slice(1, 2), span(4, 8), "causal")
    assert backend.prepare(plan).direct
    ((name, arguments),) = calls
    assert name == "BatchDecodeWithPagedKVCacheWrapper"
    assert arguments["indptr"].tolist() == [0, 3, 4]
    assert arguments["last_page_len"].tolist() == [1, 4]
    assert arguments["kwargs"] == {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def test_prefill_states_causal_and_dtypes(recorded):
    backend, calls = recorded
    plan = AttentionPlan(6)
    plan.add(slice(0, 5), span(9, 0), "causal")
    plan.add(slice(5, 6), span(4, 8), "causal")
    assert backend.prepare(plan).direct
    ((name, arguments),) = calls
    assert name == "BatchPrefillWithPagedKVCacheWrapper"
    assert arguments["causal"] is True
    assert arguments["q_data_type"] == arguments["kv_data_type"] == torch.bfloat16
    assert arguments["qo_indptr"].tolist() == [0, 5, 6]


def test_shared_span_needs_calls_that_are_merged(recorded):
    backend, calls = recorded
    plan = AttentionPlan(4)
    plan.add(slice(0, 4), span(16, 0, shift=7), "full")
    plan.add(slice(0, 4), span(4, 8), "causal")
    prepared = backend.prepare(plan)
    assert not prepared.direct
    assert [arguments["causal"] for _, arguments in calls] == [False, True]
    assert prepared.calls[0].cos_sin is not None
    assert prepared.calls[1].cos_sin is None


def test_small_operations_fit_the_real_signatures(monkeypatch):
    ops, seen = FlashInferOps(), []
    for name in ("rmsnorm", "silu_and_mul"):
        signature = inspect.signature(getattr(flashinfer, name))

        def record(*args, signature=signature, name=name):
            seen.append((name, signature.bind(*args).arguments))
            return args[0]

        monkeypatch.setattr(flashinfer, name, record)
    x = torch.randn(3, 2, 8)
    assert ops.rms_norm(x, torch.ones(8), 1e-5).shape == x.shape
    ops.silu_and_mul(torch.randn(3, 16))
    assert seen[0][1]["eps"] == 1e-5
    assert [name for name, _ in seen] == ["rmsnorm", "silu_and_mul"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_small_operations_on_a_gpu():
    x, weight = torch.randn(5, 3, 64, device="cuda").bfloat16(), torch.randn(64, device="cuda").bfloat16()
    gate_up = torch.randn(7, 256, device="cuda").bfloat16()
    ours, torchs = FlashInferOps(), Ops()
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-5), torchs.rms_norm(x, weight, 1e-5), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(ours.silu_and_mul(gate_up), torchs.silu_and_mul(gate_up), atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["decode", "prefill", "shared", "masked"])
def test_results_on_a_gpu(page_size, kind):
    from runtime.attention.flashinfer import FlashInferAttention

    device = torch.device("cuda")
    pool = KVPool(1, 4096 // page_size, page_size, KV_HEADS, DIM, torch.bfloat16, device)
    pool.k.normal_()
    pool.v.normal_()
    rope = RotaryEmbedding(RopeSpec(theta=10000.0), DIM, device)
    free = torch.randperm(pool.num_pages).tolist()

    def take(length: int, **options) -> Span:
        count = -(-length // page_size)
        pages = [free.pop() for _ in range(count)]
        return Span(np.array(pages, dtype=np.int32), length, **options)

    plan = AttentionPlan(7)
    if kind == "decode":
        for row in range(7):
            plan.add(slice(row, row + 1), take(17 + 40 * row), "causal")
    elif kind == "prefill":
        plan.add(slice(0, 5), take(105), "causal")
        plan.add(slice(5, 7), take(2), "causal")
    elif kind == "shared":
        plan.add(slice(0, 7), take(301, shift=11), "full")
        plan.add(slice(0, 3), take(33), "causal")
        plan.add(slice(3, 7), take(4), "causal")
    else:
        plan.add(slice(0, 7), take(50, keep=torch.rand(50) < 0.5), "full")
        plan.add(slice(0, 7), take(20), "masked", torch.rand(7, 20) < 0.5)
    q = torch.randn(7, HEADS, DIM, dtype=torch.bfloat16, device=device)
    ours, reference = FlashInferAttention(pool, rope, HEADS), CPUAttention(pool, rope)
    got = ours.run(ours.prepare(plan), q, 0).float()
    wanted = reference.run(reference.prepare(plan), q, 0).float()
    assert (got - wanted).norm() / wanted.norm() < 1e-2
