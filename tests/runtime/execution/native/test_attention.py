"""Native attention against plain attention over the union of what a row's edges show it."""

import ctypes

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, Span
from runtime.execution.attention.paged_index import flat_mask, rows_of
from runtime.execution.native import library as c
from runtime.execution.native.decoder import Team
from runtime.execution.native.plan import NativePlan
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate
from runtime.models.spec import RopeSpec


class World:
    """A pool of random rows, the native kernels over it, and plain attention in float64."""

    def __init__(self, library, *, seed=0, page_size=4, heads=6, kv_heads=2, dim=16, dtype=torch.float32, threads=2):
        self.library, self.threads = library, threads
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.rope = RotaryEmbedding(RopeSpec(theta=10000.0), dim, torch.device("cpu"))
        self.pool = KVPool(1, 6000 // page_size, page_size, kv_heads, dim, dtype, torch.device("cpu"))
        for tensor in (self.pool.k, self.pool.v):
            tensor.copy_(torch.randn(tensor.shape, generator=self.generator))
        self.free = list(range(self.pool.num_pages))

    def span(self, length, scattered=True, **options):
        count = -(-length // self.pool.page_size)
        if scattered:
            self.random.shuffle(self.free)
        else:
            self.free.sort()
        pages, self.free = self.free[:count], self.free[count:]
        return Span(np.array(pages, dtype=np.int32), length, **options)

    def mask(self, *shape, share=0.5):
        return torch.rand(shape, generator=self.generator) < share

    def plain(self, plan, q):
        scores = [[] for _ in range(plan.num_rows)]
        values = [[] for _ in range(plan.num_rows)]
        group = self.heads // self.kv_heads
        for edge in plan.edges:
            rows, span = rows_of(edge, plan.num_rows).tolist(), plan.spans[edge.span]
            pages = torch.from_numpy(span.pages).long()
            slots = (pages[:, None] * self.pool.page_size + torch.arange(self.pool.page_size)).flatten()[: span.length]
            shift = torch.full((span.length,), span.shift)
            k = rotate(self.pool.k[0][slots].double(), *(t.double() for t in self.rope.cos_sin(shift)))
            k, v = (t.double().repeat_interleave(group, 1) for t in (k, self.pool.v[0][slots]))
            seen = flat_mask(edge, span, len(rows)).view(len(rows), span.length)
            products = torch.einsum("nhd,mhd->nhm", q[rows].double(), k) / self.dim**0.5
            for row, visible, product in zip(rows, seen, products, strict=True):
                scores[row].append(product[:, visible])
                values[row].append(v[visible])
        out = torch.zeros(q.shape, dtype=torch.float64)
        for row in range(plan.num_rows):
            if scores[row] and (s := torch.cat(scores[row], 1)).shape[1]:
                out[row] = torch.einsum("hm,mhd->hd", s.softmax(-1), torch.cat(values[row]))
        return out

    def run(self, plan, q):
        team = Team(self.library, self.threads)
        shape = c.Shape(self.heads, self.kv_heads, self.dim, self.pool.page_size, self.pool.k.dtype == torch.bfloat16)
        kv = c.LayerKV(self.pool.k[0].data_ptr(), self.pool.v[0].data_ptr())
        native = NativePlan(plan, self.rope)
        out = torch.full(q.shape, torch.nan)
        self.library.attend(
            team.handle,
            *(ctypes.byref(shape), ctypes.byref(kv), native.spans, native.edges, native.num_edges, plan.num_rows),
            *(q.data_ptr(), out.data_ptr()),
        )
        return out

    def check(self, plan):
        q = torch.randn(plan.num_rows, self.heads, self.dim, generator=self.generator)
        torch.testing.assert_close(self.run(plan, q).double(), self.plain(plan, q), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (1, 13), (1, 1999), (5, 5), (8, 70), (64, 64), (65, 200), (150, 513)]
)
def test_causal_request(library, dtype, threads, page_size, rows, length):
    world = World(library, page_size=page_size, dtype=dtype, threads=threads)
    plan = AttentionPlan(rows)
    plan.add(slice(0, rows), world.span(length), "causal")
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 6, 8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (200, 1)])
def test_any_shape_of_heads(library, dtype, dim, heads, kv_heads):
    world = World(library, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    plan = AttentionPlan(5)
    plan.add(slice(0, 5), world.span(70), "full")
    plan.add(slice(0, 5), world.span(9), "causal")
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (7, 1)])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 257, 700])
def test_decode_reads_keys_in_place(library, dtype, heads, kv_heads, length):
    world = World(library, page_size=16, heads=heads, kv_heads=kv_heads, dim=64, dtype=dtype)
    plan = AttentionPlan(3)
    plan.add(slice(0, 2), world.span(33), "full")
    for row in range(3):
        plan.add(slice(row, row + 1), world.span(length + row, shift=5 * row), "causal")
    world.check(plan)


def test_mixed_batch_of_prefill_and_decode(library):
    world = World(library)
    plan = AttentionPlan(90)
    plan.add(slice(0, 1), world.span(17), "causal")
    plan.add(slice(1, 89), world.span(120, False), "causal")
    plan.add(slice(89, 90), world.span(700), "causal")
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sharing", [2, 7, 64, 100])
def test_shared_span_with_private_tails(library, dtype, threads, sharing):
    world = World(library, threads=threads, dtype=dtype)
    plan = AttentionPlan(sharing)
    plan.add(slice(0, sharing), world.span(1000), "full")
    for row in range(sharing):
        plan.add(slice(row, row + 1), world.span(1 + row % 9), "causal")
    world.check(plan)


def test_shift_moves_keys_by_turning_queries(library):
    world = World(library)
    plan = AttentionPlan(4)
    plan.add(slice(0, 4), world.span(11, shift=37), "full")
    plan.add(slice(0, 4), world.span(300, shift=-5), "full")
    plan.add(slice(0, 4), world.span(4), "causal")
    world.check(plan)


@pytest.mark.parametrize("length", [14, 64, 500])
def test_keep_masks_rows_of_a_span(library, length):
    world = World(library)
    plan = AttentionPlan(6)
    plan.add(slice(0, 6), world.span(length, keep=world.mask(length), shift=3), "full")
    plan.add(slice(0, 6), world.span(10, keep=torch.arange(10) != 2), "causal")
    world.check(plan)


@pytest.mark.parametrize("length", [9, 64, 700])
def test_masked_edges_and_scattered_rows(library, length):
    world = World(library)
    mask = world.mask(3, length, share=0.1)
    mask[1] = False
    plan = AttentionPlan(6)
    plan.add(torch.tensor([5, 0, 2]), world.span(length), "masked", mask)
    plan.add(slice(1, 5), world.span(7), "full")
    world.check(plan)


@pytest.mark.parametrize("length", [5, 600])
def test_a_row_that_sees_nothing_gives_zeros(library, length):
    world = World(library)
    plan = AttentionPlan(3)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1] = False
    plan.add(slice(0, 2), world.span(length), "masked", mask)
    q = torch.randn(3, world.heads, world.dim)
    out = world.run(plan, q)
    assert out[1:].abs().max() == 0
    torch.testing.assert_close(out.double(), world.plain(plan, q), atol=3e-6, rtol=2e-5)


def test_scores_that_exp_cannot_take(library):
    """Scores in the hundreds: only differences to the largest may be exponentiated."""
    world = World(library)
    world.pool.k.mul_(100)
    plan = AttentionPlan(7)
    plan.add(slice(0, 7), world.span(800), "causal")
    q = torch.randn(7, world.heads, world.dim)
    torch.testing.assert_close(world.run(plan, q).double(), world.plain(plan, q), atol=1e-3, rtol=1e-3)


def test_a_span_may_have_several_edges(library):
    world = World(library)
    plan = AttentionPlan(8)
    plan.add(slice(0, 3), world.span(90), "full")
    plan.edges.append(type(plan.edges[0])(slice(5, 8), 0, "causal"))
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(30))
def test_random_plans(library, seed, dtype):
    world = World(library, seed=seed, dtype=dtype, page_size=[1, 4, 16][seed % 3], threads=1 + seed % 2)
    draw = world.random
    num_rows = int(draw.integers(1, 100))
    plan = AttentionPlan(num_rows)
    if seed % 4:
        plan.add(slice(0, num_rows), world.span(int(draw.integers(1, 900))), "full")
    for _ in range(int(draw.integers(1, 6))):
        count = int(draw.integers(1, num_rows + 1))
        rows = torch.randperm(num_rows, generator=world.generator)[:count]
        length = int(draw.integers(count, count + 300))
        span = world.span(length, bool(draw.integers(2)), shift=int(draw.integers(-50, 50)))
        if draw.integers(2):
            span.keep = world.mask(length, share=0.7)
        mode = ["causal", "full", "masked"][int(draw.integers(3))]
        plan.add(rows, span, mode, world.mask(count, length) if mode == "masked" else None)
    world.check(plan)
