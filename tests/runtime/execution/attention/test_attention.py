"""The attention interface against plain softmax attention over explicitly moved keys."""

import math

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, Edge, Span
from runtime.execution.attention.cpu import CPUAttention, attend, merge
from runtime.execution.attention.paged_index import flat_mask, merge_table, paged_index, rows_of
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate
from runtime.models.spec import RopeSpec

HEADS, KV_HEADS, DIM = 6, 2, 16
ROPE = RotaryEmbedding(RopeSpec(theta=10000.0), DIM, torch.device("cpu"))


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return rotate(x, *ROPE.cos_sin(positions))


class World:
    """A pool with random rows at known positions, and plain attention over it in float64."""

    def __init__(self, seed: int, num_pages: int = 40, page_size: int = 4):
        self.generator = torch.Generator().manual_seed(seed)
        self.random = np.random.default_rng(seed)
        self.pool = KVPool(1, num_pages, page_size, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        self.pool.k.normal_(generator=self.generator)
        self.pool.v.normal_(generator=self.generator)
        self.backend = CPUAttention(self.pool, ROPE)
        self.free = list(range(num_pages))

    def span(self, length: int, scattered: bool, **options) -> Span:
        count = -(-length // self.pool.page_size)
        if scattered:
            self.random.shuffle(self.free)
        else:
            self.free.sort()
        pages, self.free = self.free[:count], self.free[count:]
        return Span(np.array(pages, dtype=np.int32), length, **options)

    def slots(self, span: Span) -> torch.Tensor:
        pages = torch.from_numpy(span.pages).long()
        return (pages[:, None] * self.pool.page_size + torch.arange(self.pool.page_size)).flatten()[: span.length]

    def plain(self, plan: AttentionPlan, q: torch.Tensor) -> torch.Tensor:
        """Every row over the union of what its edges show it, keys moved (not queries), in float64."""
        out = torch.zeros_like(q, dtype=torch.float64)
        for row in range(plan.num_rows):
            keys, values = [], []
            for edge in plan.edges:
                rows = rows_of(edge, plan.num_rows).tolist()
                if row not in rows:
                    continue
                span, at = plan.spans[edge.span], rows.index(row)
                seen = flat_mask(edge, span, len(rows)).view(len(rows), span.length)[at]
                slots = self.slots(span)[seen]
                k = self.pool.k[0][slots]
                keys.append(turn(k, torch.full((len(k),), span.shift)))
                values.append(self.pool.v[0][slots])
            k, v = torch.cat(keys).double(), torch.cat(values).double()
            if len(k):
                k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
                scores = torch.einsum("hd,shd->hs", q[row].double(), k) / math.sqrt(DIM)
                out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), v)
        return out

    def check(self, plan: AttentionPlan) -> None:
        q = torch.randn(plan.num_rows, HEADS, DIM, generator=self.generator)
        got = self.backend.run(self.backend.prepare(plan), q, 0)
        torch.testing.assert_close(got.double(), self.plain(plan, q), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 13), (5, 5), (5, 22), (8, 8), (7, 9)])
def test_causal_request(scattered, rows, length):
    world = World(rows * 100 + length)
    plan = AttentionPlan(rows)
    plan.add(slice(0, rows), world.span(length, scattered), "causal")
    world.check(plan)


@pytest.mark.parametrize(("start", "stop"), [(0, 640), (5, 640), (130, 387), (0, 1)])
def test_long_extents_are_read_as_views(start, stop):
    """Two extents that are far apart: no gather, and the rows are those of the span."""
    world = World(7, num_pages=200)
    pages = np.concatenate((np.arange(100, 180), np.arange(0, 80))).astype(np.int32)
    span = Span(pages, stop)
    pieces = world.backend._pieces(span, start, stop)
    assert all(isinstance(piece, slice) for piece in pieces)
    read = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
    assert read.tolist() == world.slots(span)[start:stop].tolist()
    plan = AttentionPlan(stop - start)
    plan.add(slice(0, stop - start), span, "causal")
    world.check(plan)


def test_mixed_batch_of_prefill_and_decode():
    world = World(1)
    plan = AttentionPlan(9)
    plan.add(slice(0, 1), world.span(17, True), "causal")
    plan.add(slice(1, 6), world.span(12, False), "causal")
    plan.add(slice(6, 9), world.span(3, True), "causal")
    world.check(plan)


def test_shared_span_with_private_tails():
    world = World(2)
    plan = AttentionPlan(5)
    plan.add(slice(0, 5), world.span(16, False), "full")
    plan.add(slice(0, 1), world.span(3, True), "causal")
    plan.add(slice(1, 2), world.span(9, True), "causal")
    plan.add(slice(2, 5), world.span(6, True), "causal")
    world.check(plan)


def test_shift_moves_keys_by_turning_queries():
    world = World(3)
    plan = AttentionPlan(4)
    plan.add(slice(0, 4), world.span(11, True, shift=37), "full")
    plan.add(slice(0, 4), world.span(8, False, shift=-5), "full")
    plan.add(slice(0, 4), world.span(4, False), "causal")
    world.check(plan)


def test_keep_masks_rows_of_a_span():
    world = World(4)
    keep = torch.rand(14, generator=world.generator) < 0.5
    plan = AttentionPlan(6)
    plan.add(slice(0, 6), world.span(14, True, keep=keep, shift=3), "full")
    plan.add(slice(0, 6), world.span(10, False, keep=torch.arange(10) != 2), "causal")
    world.check(plan)


def test_masked_edges_and_scattered_rows():
    world = World(5)
    mask = torch.rand(3, 9, generator=world.generator) < 0.4
    mask[1] = False
    plan = AttentionPlan(6)
    plan.add(torch.tensor([5, 0, 2]), world.span(9, True), "masked", mask)
    plan.add(slice(1, 5), world.span(7, False), "full")
    world.check(plan)


def test_a_row_that_sees_nothing_gives_zeros():
    world = World(6)
    plan = AttentionPlan(2)
    plan.add(slice(0, 2), world.span(5, False), "masked", torch.tensor([[True] * 5, [False] * 5]))
    q = torch.randn(2, HEADS, DIM)
    out = world.backend.run(world.backend.prepare(plan), q, 0)
    assert out[1].abs().max() == 0
    assert out.isfinite().all()


@pytest.mark.parametrize("seed", range(20))
def test_random_plans(seed):
    world = World(seed + 50, num_pages=80)
    num_rows = int(world.random.integers(1, 12))
    plan = AttentionPlan(num_rows)
    plan.add(slice(0, num_rows), world.span(int(world.random.integers(1, 20)), True), "full")
    for _ in range(int(world.random.integers(1, 6))):
        count = int(world.random.integers(1, num_rows + 1))
        rows = torch.randperm(num_rows, generator=world.generator)[:count]
        length = int(world.random.integers(count, count + 20))
        span = world.span(length, bool(world.random.integers(2)), shift=int(world.random.integers(-50, 50)))
        if world.random.integers(2):
            span.keep = torch.rand(length, generator=world.generator) < 0.7
        mode = ["causal", "full", "masked"][int(world.random.integers(3))]
        mask = torch.rand(count, length, generator=world.generator) < 0.5 if mode == "masked" else None
        plan.add(rows, span, mode, mask)
    world.check(plan)


def test_partial_results_merge_exactly():
    q, k, v = (torch.randn(1, 2, n, DIM) for n in (3, 20, 20))
    whole, whole_lse = attend(q, k, v, False, None)
    parts = [attend(q, k[:, :, s], v[:, :, s], False, None) for s in (slice(0, 7), slice(7, 20))]
    flat = [(o[0].transpose(0, 1), s[0].transpose(0, 1)) for o, s in parts]
    out, lse = merge(*flat[0], *flat[1])
    torch.testing.assert_close(out, whole[0].transpose(0, 1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse[0].transpose(0, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_merge_tables_name_every_partial_result_once(seed):
    random = np.random.default_rng(seed)
    rows = random.integers(0, 6, size=20)
    table = merge_table(rows, 7)
    for row in range(7):
        wanted = np.flatnonzero(rows == row).tolist()
        assert table[row].tolist() == wanted + [20] * (table.shape[1] - len(wanted))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_index_arrays_against_a_brute_force_reading(page_size):
    """Read qo_indptr, kv_indptr, kv_indices and last_page_len as FlashInfer does, slot by slot."""
    random = np.random.default_rng(page_size)
    plan, free = AttentionPlan(10), list(random.permutation(200))
    wanted = []
    for rows, length in ((slice(0, 1), 33), (slice(1, 8), 16), (torch.tensor([9, 3]), 5)):
        count = -(-length // page_size)
        pages, free = free[:count], free[count:]
        shift = int(random.integers(0, 9))
        plan.add(rows, Span(np.array(pages, dtype=np.int32), length, shift), "full")
        slots = [int(pages[i // page_size]) * page_size + i % page_size for i in range(length)]
        wanted.append((rows_of(plan.edges[-1], 10).tolist(), slots, shift))
    index = paged_index(plan, plan.edges, page_size)
    for i, (rows, slots, shift) in enumerate(wanted):
        queries = slice(index.qo_indptr[i], index.qo_indptr[i + 1])
        assert index.rows[queries].tolist() == rows
        assert (index.shift[queries] == shift).all()
        pages = index.kv_indices[index.kv_indptr[i] : index.kv_indptr[i + 1]]
        read = [int(p) * page_size + r for p in pages for r in range(page_size)]
        used = (len(pages) - 1) * page_size + int(index.last_page_len[i])
        assert read[:used] == slots
    assert index.qo_indptr.dtype == index.kv_indptr.dtype == index.kv_indices.dtype == np.int32
    assert not index.decode_only
    assert paged_index(plan, plan.edges[:1], page_size).decode_only


def test_flat_mask_of_a_causal_edge_is_aligned_to_the_end():
    edge = Edge(slice(0, 2), 0, "causal")
    span = Span(np.array([0], dtype=np.int32), 4, keep=torch.tensor([True, False, True, True]))
    assert flat_mask(edge, span, 2).view(2, 4).tolist() == [[True, False, True, False], [True, False, True, True]]
