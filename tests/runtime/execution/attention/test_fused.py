"""The calls that torch's attention makes on a GPU, without one: their batching is exact, their number is small."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.batch import AttentionPlan, Span
from runtime.execution.attention import fused, varlen
from runtime.execution.attention.fused import FusedAttention
from runtime.execution.attention.torch_attention import Scores, TorchAttention
from runtime.execution.attention.varlen import efficient, flash
from runtime.kv.pool import KVPool
from tests.runtime.execution.attention.dense import World, dense_attention

HEADS, KV_HEADS, DIM = 6, 2, 16
META = torch.device("meta")
# Operations that launch no kernel.
NOTHING = (
    "view",
    "expand",
    "permute",
    "transpose",
    "select",
    "slice",
    "unsqueeze",
    "alias",
    "empty",
    "split",
    "detach",
)


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.strip("_") not in NOTHING and not name.startswith(("_unsafe_view", "t", "squeeze", "sym_")):
            self.names.append(name)
        return func(*args, **kwargs)


def launches(kind, plan, dtype=torch.bfloat16, **options):
    """What one layer launches for a plan, with 32 query heads and 8 KV heads of 128."""
    backend = kind(KVPool(1, 4096, 16, 8, 128, dtype, META), **options)
    prepared, q = backend.prepare(plan), torch.empty(plan.num_rows, 32, 128, dtype=dtype, device=META)
    with Launches() as counted:
        assert backend.run(prepared, q, 0).shape == q.shape
    return counted.names


def decode_plan(rows, length, shared=0):
    plan = AttentionPlan(rows)
    if shared:
        plan.add(slice(0, rows), Span(np.arange(4000, 4000 + shared // 16, dtype=np.int32), shared))
    for row in range(rows):
        pages = np.arange(row, 32 * (length // 16 + 1), 32, dtype=np.int32)[: length // 16 + 1]
        plan.add(slice(row, row + 1), Span(pages, length))
    return plan


def world(seed, page_size=4):
    made = World(seed, 800, page_size, KV_HEADS, DIM)
    made.backend = FusedAttention(made.pool, made.rope)
    return made


def test_a_decode_step_of_32_requests_is_three_launches_a_layer(monkeypatch):
    monkeypatch.setattr(fused, "choose_kernel", lambda *_: flash)
    few = launches(FusedAttention, decode_plan(32, 100))
    assert few == ["index_select", "index_select", "_flash_attention_forward"]
    assert len(launches(TorchAttention, decode_plan(32, 100))) > 30 * len(few), "the loop over edges"


def test_a_shared_prefix_adds_a_call_and_a_merge_whatever_the_number_of_rows(monkeypatch):
    monkeypatch.setattr(fused, "choose_kernel", lambda *_: flash)
    few, many = (launches(FusedAttention, decode_plan(rows, 40, shared=64)) for rows in (4, 32))
    assert few == many
    assert len(many) < 25


def test_float32_takes_few_calls_too(monkeypatch):
    monkeypatch.setattr(fused, "choose_kernel", lambda *_: efficient)
    names = launches(FusedAttention, decode_plan(32, 100), torch.float32)
    assert names.count("_efficient_attention_forward") == 1
    assert len(names) < 8


def test_a_prompt_behind_a_long_prefix_is_one_causal_call(monkeypatch):
    monkeypatch.setattr(fused, "choose_kernel", lambda *_: flash)
    plan = AttentionPlan(300)
    plan.add(slice(0, 300), Span(np.arange(64, dtype=np.int32), 1000), np.arange(701, 1001, dtype=np.int32))
    assert launches(FusedAttention, plan).count("_flash_attention_forward") == 1


def test_single_rows_need_no_mask_for_thinned_and_hidden_keys():
    made = world(3)
    plan = AttentionPlan(2)
    plan.add(slice(0, 1), made.span(50, keep=torch.arange(50) % 3 > 0), None, np.array([7], dtype=np.int32))
    plan.add(slice(1, 2), made.span(30, shift=9), np.array([20], dtype=np.int32))
    (call,) = made.backend.prepare(plan).calls
    assert not call.sequences.masks
    assert call.sequences.keys == [sum(1 for i in range(7, 50) if i % 3), 20]
    q = made.draw(2, HEADS, DIM)
    got = made.backend.run(made.backend.prepare(plan), q, 0)
    torch.testing.assert_close(got.double(), dense_attention(plan, q, made.pool, made.rope), atol=2e-6, rtol=2e-5)


def test_the_gathered_keys_of_a_call_are_bounded(monkeypatch):
    monkeypatch.setattr(fused, "_GATHERED_BYTES", 100 * 2 * KV_HEADS * DIM * 4)
    made, plan = world(5), AttentionPlan(6)
    for row in range(6):
        plan.add(slice(row, row + 1), made.span(45))
    prepared = made.backend.prepare(plan)
    assert [sum(call.sequences.keys) for call in prepared.calls] == [90, 90, 90]
    q = made.draw(6, HEADS, DIM)
    wanted = dense_attention(plan, q, made.pool, made.rope)
    torch.testing.assert_close(made.backend.run(prepared, q, 0).double(), wanted, atol=2e-6, rtol=2e-5)


def test_long_prompts_are_computed_in_chunks_of_rows(monkeypatch):
    """No whole matrix of scores where the general path computes a prompt."""
    monkeypatch.setattr(varlen, "_MOST_SCORES", HEADS * 70 * 8)
    made, plan = world(6), AttentionPlan(60)
    made.causal(plan, slice(0, 60), 70)
    most = []
    real = varlen.attend
    monkeypatch.setattr(varlen, "attend", lambda q, k, *rest: most.append(q.shape[2]) or real(q, k, *rest))
    q = made.draw(60, HEADS, DIM)
    got = made.backend.run(made.backend.prepare(plan), q, 0)
    torch.testing.assert_close(got.double(), dense_attention(plan, q, made.pool, made.rope), atol=2e-6, rtol=2e-5)
    assert max(most) == 8 * HEADS // KV_HEADS


@pytest.mark.parametrize("rows", [1, 3])
def test_sinks_and_caps(rows):
    made, plan = world(9), AttentionPlan(rows)
    plan.add(slice(0, rows), made.span(40))
    made.causal(plan, slice(0, rows), 20)
    q, sinks = made.draw(rows, HEADS, DIM), made.draw(HEADS)
    prepared = made.backend.prepare(plan)
    got = made.backend.run(prepared, q, 0, Scores(sinks=sinks))
    wanted = dense_attention(plan, q, made.pool, made.rope, sinks)
    torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=2e-5)
    exact = TorchAttention(made.pool, made.rope)
    how = Scores(scale=0.3, cap=2.0)
    torch.testing.assert_close(
        made.backend.run(prepared, q, 0, how), exact.run(exact.prepare(plan), q, 0, how), atol=2e-6, rtol=2e-5
    )


def test_latent_and_float8_pools():
    """Values that are the keys are gathered once; float8 is widened after it is gathered."""
    pool = KVPool(1, 8, 16, 1, DIM, torch.float32, torch.device("cpu"), halves=1)
    pool.k.copy_(torch.randn(pool.k.shape, generator=torch.Generator().manual_seed(1)))
    plan = AttentionPlan(1)
    plan.add(slice(0, 1), Span(np.array([3, 1], dtype=np.int32), 20))
    q = torch.ones(1, HEADS, DIM)
    backend = FusedAttention(pool)
    with Launches() as counted:
        got = backend.run(backend.prepare(plan), q, 0)
    assert counted.names.count("index_select") == 1
    eighth = KVPool(1, 8, 16, 1, DIM, torch.float8_e4m3fn, torch.device("cpu"))
    eighth.k.copy_(pool.k)
    eighth.v.copy_(pool.k)
    backend, exact = FusedAttention(eighth), TorchAttention(eighth)
    found, wanted = (one.run(one.prepare(plan), q, 0) for one in (backend, exact))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert math.isclose(float((found - got).abs().max()), 0, abs_tol=0.1)


class Wrong:
    """Kernels that do not compute what they should."""

    @staticmethod
    def shape(q, *_):
        return q, q[..., 0].t()

    @staticmethod
    def base(q, k, v, of, how):
        out, lse = varlen.by_sequence(q, k, v, of, how)
        return out, lse / math.log(2)

    @staticmethod
    def from_the_start(q, k, v, of, how):
        return varlen.by_sequence(q, k, v, replace(of, causal=False), how)

    @staticmethod
    def missing(*_):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("shape", "shapes"),
        ("base", "error of"),
        ("from_the_start", "error of"),
        ("missing", "FlashAttention only supports Ampere GPUs or newer."),
    ],
)
def test_a_kernel_of_another_layout_or_meaning_is_not_used(kernel, fault):
    q = torch.zeros(1, HEADS, DIM)
    assert fault in varlen.fault_of(getattr(Wrong, kernel), q, KV_HEADS)
    assert varlen.fault_of(varlen.by_sequence, q, KV_HEADS) is None
