"""FlashInfer's own wrappers, where it is installed, above kernels that are computed in torch: no GPU is needed."""

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, Span, causal_visible
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.graph_calls import Buffers, CallShape, GraphAttention, RowShape, graph_index
from runtime.execution.attention.graph_step import graph_step
from runtime.execution.attention.paged_index import causal_window
from runtime.execution.flashinfer_kernels import every_kernel
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.rope_spec import RopeSpec
from tests.runtime.execution.attention.dense import Pages, dense_attention, random_plan
from tests.runtime.execution.attention.stand_in import attend, merge_state_in_place, merge_states, near, slots

flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

_MASKS = {0: "none", 1: "causal", 2: "custom"}


class Kernels:
    """Libraries of kernels as FlashInfer's wrappers call them, by position, computed in torch.

    Attributes:
        asked: what described each library.
        plans: of each call of `plan`, its arguments.
    """

    def __init__(self) -> None:
        self.asked: set[tuple] = set()
        self.plans: list[tuple] = []

    def open(self, kind: str, *description: object) -> SimpleNamespace:
        self.asked.add((kind, *description))
        run = {"paged_run": self.prefill} if kind == "prefill" else {"run": self.decode}
        return SimpleNamespace(plan=self.plan, **run)

    def plan(self, *given: object) -> list[int]:
        self.plans.append(given)
        return [len(self.plans)]

    def prefill(self, _float, _int, _plan, q, k, v, qo_indptr, indptr, indices, last, out, lse, mask, layout, *more):
        window_left, _pdl, bits, bits_indptr, *_ = more
        scale = more[9]
        assert (layout, scale) == (0, pytest.approx(q.shape[-1] ** -0.5))
        for i in range(len(last)):
            mine = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
            n, m = mine.stop - mine.start, len(slots(indptr, indices, last, k.shape[1], i))
            seen = near(n, m, _MASKS[mask] == "causal", window_left)
            if _MASKS[mask] == "custom":
                packed = bits[int(bits_indptr[i]) : int(bits_indptr[i + 1])].numpy()
                unpacked = np.unpackbits(packed, count=n * m, bitorder="little")
                seen = torch.from_numpy(unpacked.astype(bool)).view(n, m)
            self.attend(q[mine], k, v, (indptr, indices, last, i), out[mine], None if lse is None else lse[mine], seen)

    def decode(self, _float, _int, _plan, q, k, v, indptr, indices, last, out, lse, layout, window_left, _pdl, *more):
        _slopes, cap, scale, *_ = more
        assert (layout, cap, scale) == (0, 0.0, pytest.approx(q.shape[-1] ** -0.5))
        for i in range(len(last)):
            row = slice(i, i + 1)
            seen = near(1, len(slots(indptr, indices, last, k.shape[1], i)), False, window_left)
            self.attend(q[row], k, v, (indptr, indices, last, i), out[row], None if lse is None else lse[row], seen)

    @staticmethod
    def attend(q, k, v, where, out, lse, seen) -> None:
        indptr, indices, last, request = where
        rows = slots(indptr, indices, last, k.shape[1], request)
        found, sums = attend(q, k.flatten(0, 1)[rows], v.flatten(0, 1)[rows], seen)
        out.copy_(found)
        if lse is not None:
            lse.copy_(sums)


@pytest.fixture
def kernels(monkeypatch):
    found, empty = Kernels(), torch.empty
    # Without a driver nothing can be pinned.
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    for module, name, kind in (
        ("prefill", "get_batch_prefill_module", "prefill"), ("decode", "get_batch_prefill_module", "prefill"),
        ("decode", "get_batch_decode_module", "decode"),
    ):  # fmt: skip
        monkeypatch.setattr(f"flashinfer.{module}.{name}", lambda *args, kind=kind: found.open(kind, *args))

    def pack(x, indptr, _indptr_new, bitorder, y) -> None:
        cuts = [x[a:b].numpy() for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
        y.copy_(torch.from_numpy(np.concatenate([np.packbits(cut, bitorder=bitorder) for cut in cuts])))

    packed = SimpleNamespace(segment_packbits=pack)
    # By its full name the module is hidden behind a function.
    packbits = sys.modules["flashinfer.quantization.packbits"]
    monkeypatch.setattr(packbits, "get_quantization_module", lambda: packed)
    monkeypatch.setattr(flashinfer, "merge_states", merge_states)
    monkeypatch.setattr(flashinfer, "merge_state_in_place", merge_state_in_place)
    return found


def backend(heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype) -> FlashInferAttention:
    torch.manual_seed(0)
    device = torch.device("cpu")
    pool = KVPool(1, 4096 // page_size, page_size, kv_heads, dim, dtype, device, spare_pages=1)
    pool.k.copy_(torch.randn(pool.k.shape))
    pool.v.copy_(torch.randn(pool.v.shape))
    return FlashInferAttention(pool, RotaryEmbedding(RopeSpec(10000.0), dim, device), heads)


SHAPES = [(8, 2, 128, 16, torch.bfloat16), (9, 3, 64, 1, torch.bfloat16), (8, 2, 64, 16, torch.float8_e4m3fn),
          (4, 4, 128, 16, torch.float8_e4m3fn)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_random_plans_through_the_wrappers_give_the_references_results(kernels, shape):
    ours = backend(*shape)
    for seed in range(6):
        pages = Pages(ours.pool, np.random.default_rng(seed))
        plan = random_plan(pages, int(pages.random.integers(1, 12)), 90)
        (ready,) = ours.prepare_step([plan])
        q = torch.randn(plan.num_rows, shape[0], shape[2]).bfloat16()
        got = ours.run(ready, q, 0).double()
        wanted = dense_attention(plan, q, ours.pool, ours.rope)
        assert (got - wanted).norm() <= 1e-2 * wanted.norm()


# Rows of the requests of three steps, for a graph of decode steps and for one of any steps, which is full once.
_STEPS = {
    RowShape(8, 8): ([1] * 8, [1] * 7, [1] * 6),
    RowShape(16, 8): ([5, 1, 4], [16], [1, 2, 1, 3, 1, 1, 1]),
}


def window_of(span: Span, rows: int, window: int | None) -> np.ndarray | None:
    """`Edge.hidden` of the last rows of a span."""
    first = np.arange(span.length - rows + 1, span.length + 1, dtype=np.int32)
    return None if window is None else (first - np.int32(window)).clip(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", _STEPS)
def test_graph_calls_plan_the_same_grid_for_every_step(kernels, shape, levels, window, rows):
    """A captured graph has the numbers of its first plan; only the contents of buffers may change."""
    ours = backend(*shape)
    calls = GraphAttention(ours, rows, CallShape(levels, window), Buffers(ours, 2048))
    pages, page_size = Pages(ours.pool, np.random.default_rng(0)), ours.pool.page_size
    every = [[], [[(0, 8)], [(2, 5), (5, 7)], [(0, 3)]], [[(0, 8), (1, 5)], [(0, 3), (0, 2), (5, 7)], [(0, 6), (4, 6)]]]
    for i, counts in enumerate(_STEPS[rows]):
        plan = AttentionPlan(sum(counts))
        for first, stop in every[levels][i] if levels else ():
            plan.add(slice(first, min(stop, plan.num_rows)), pages.span(3 + 16 * i))
        for number, (first, stop) in enumerate(pairwise(np.cumsum([0, *counts]).tolist())):
            span = pages.span(8 + 10 * number + stop - first)
            visible, hidden = causal_visible(span.length, stop - first), window_of(span, stop - first, window)
            plan.add(slice(first, stop), span, visible, hidden)
        step = graph_step(plan, causal_window(plan))
        assert step is not None
        assert (len(step.levels), step.window, step.decodes) == (levels, window, rows.decodes)
        index = graph_index(step, rows, ours.pool.num_pages, page_size)
        assert index is not None
        calls.plan(index)
        q = torch.randn(rows.size, shape[0], shape[2]).bfloat16()
        got = ours.run(calls.calls, q, 0)[: plan.num_rows].double()
        wanted = dense_attention(plan, q[: plan.num_rows], ours.pool, ours.rope)
        assert (got - wanted).norm() <= 1e-2 * wanted.norm()
    number = 2 if levels else 1
    for call in range(number):
        sizes = [tuple(x for x in given if isinstance(x, int | float)) for given in kernels.plans[call::number]]
        assert len(sizes) == 3
        assert len(set(sizes)) == 1


def test_the_kernels_that_are_compiled_ahead_are_those_that_plans_ask_for(kernels, monkeypatch):
    for shape in SHAPES:
        ours = backend(*shape)
        for seed in range(4):
            ours.prepare_step([random_plan(Pages(ours.pool, np.random.default_rng(seed)), 9, 90)])
    for kind in ("prefill", "decode"):
        monkeypatch.setattr(f"flashinfer.jit.attention.gen_batch_{kind}_module", lambda *args, kind=kind: (kind, *args))
    ahead = {kernel.describe() for kernel in every_kernel() if kernel.name.startswith(("prefill", "decode"))}
    assert len(ahead) == 16
    assert kernels.asked <= ahead
    assert {kind for kind, *_ in kernels.asked} == {"prefill", "decode"}
