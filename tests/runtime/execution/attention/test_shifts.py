"""KV reused at other positions than it was computed for: as near to the exact scores as KV that was computed there."""

import math
import sys

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, Span
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.torch_attention import TorchAttention
from runtime.execution.native.library import load_best
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate
from runtime.models.rope_spec import RopeSpec
from tests.runtime.execution.attention.stand_in import stand_in
from tests.runtime.execution.native.attend import attend_natively

HEADS, KV_HEADS, DIM, QUERIES, KEYS = 4, 2, 64, 96, 256
SPECS = {
    "default": RopeSpec(1e4),
    "linear": RopeSpec(1e4, "linear", 4.0),
    "llama3": RopeSpec(5e5, "llama3", 8.0, 8192, 1.0, 4.0),
    "yarn": RopeSpec(1e4, "yarn", 4.0, 4096, amplitude=1.14),
}


def exact_rotation(x, positions, rope):
    angles = positions.double()[:, None, None] * rope.inv_freq.double()
    a, b = x.double().chunk(2, -1)
    turned = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    return turned * rope.amplitude


def torch_attention(plan, q, pool, rope):
    backend = TorchAttention(pool, rope)
    return backend.run(backend.prepare(plan), q, 0)


def native_attention(plan, q, pool, rope):
    library = load_best()
    if library is None:
        pytest.skip("no native kernels")
    return attend_natively(library, plan, q.float(), pool, rope)


def flashinfer_attention(plan, q, pool, rope):
    backend = FlashInferAttention(pool, rope, HEADS, q.dtype)
    (prepared,) = backend.prepare_step([plan])
    return backend.run(prepared, q, 0)


def error(attention, rope, dtype, shift):
    """Relative error of queries and keys that are rounded to `dtype` once rotated; some of the keys are `shift` off."""
    torch.manual_seed(0)
    # Large scores, so that their error is the greater part of the result's.
    q, k, v = (
        3 * torch.randn(QUERIES, HEADS, DIM),
        3 * torch.randn(KEYS, KV_HEADS, DIM),
        torch.randn(KEYS, KV_HEADS, DIM),
    )
    ours, theirs = 6000 + torch.randperm(QUERIES), torch.randperm(KEYS)
    pool = KVPool(1, KEYS // 16, 16, KV_HEADS, DIM, dtype, torch.device("cpu"))
    pool.k[0, :KEYS] = rotate(k, *rope.cos_sin(theirs)).to(dtype)
    pool.v[0, :KEYS] = v.to(dtype)
    plan = AttentionPlan(QUERIES)
    plan.add(slice(0, QUERIES), Span(np.arange(KEYS // 16, dtype=np.int32), KEYS, shift))
    got = attention(plan, rotate(q, *rope.cos_sin(ours)).to(dtype), pool, rope).double()
    exact_q, exact_k = exact_rotation(q, ours, rope), exact_rotation(k, theirs + shift, rope)
    exact_k, exact_v = (t.double().repeat_interleave(HEADS // KV_HEADS, 1) for t in (exact_k, v.to(dtype)))
    weights = (torch.einsum("nhd,mhd->hnm", exact_q, exact_k) / math.sqrt(DIM)).softmax(-1)
    wanted = torch.einsum("hnm,mhd->nhd", weights, exact_v)
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("attention", [torch_attention, native_attention, flashinfer_attention])
def test_shifted_keys_are_nearly_as_exact_as_others(monkeypatch, attention, kind):
    """In bfloat16 a shifted query is rounded once more: three roundings of equal size instead of two."""
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    rope = RotaryEmbedding(SPECS[kind], DIM, torch.device("cpu"))
    usual = error(attention, rope, torch.bfloat16, 0)
    for shift in (-129, 37, 4321, 5500):
        assert error(attention, rope, torch.bfloat16, shift) < 1.3 * usual
        assert error(attention, rope, torch.float32, shift) < 3e-4
