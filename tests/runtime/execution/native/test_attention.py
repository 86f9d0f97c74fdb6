"""Native attention against plain attention over the union of what a row's edges show it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, Edge, Span, causal_visible
from tests.runtime.execution.attention import dense
from tests.runtime.execution.attention.dense import dense_attention, random_plan
from tests.runtime.execution.native.attend import attend_natively


class World(dense.World):
    """Over the native kernels, and plain attention in float64."""

    def __init__(
        self, library, *, seed=0, page_size=4, heads=6, kv_heads=2, dim=16, dtype=torch.float32, threads=2, rows=6000
    ):
        super().__init__(seed, rows, page_size, kv_heads, dim, dtype)
        self.library, self.threads = library, threads
        self.heads, self.dim, self.sinks = heads, dim, None

    def plain(self, plan, q):
        return dense_attention(plan, q, self.pool, self.rope, self.sinks)

    def run(self, plan, q):
        return attend_natively(self.library, plan, q, self.pool, self.rope, self.threads, self.sinks)

    def check(self, plan, q=None):
        if q is None:
            q = self.draw(plan.num_rows, self.heads, self.dim)
        if self.library.multiplies_pairs and self.pool.k.dtype == torch.bfloat16:
            self.check_rounded(plan, q)
        else:
            torch.testing.assert_close(self.run(plan, q).double(), self.plain(plan, q), atol=3e-6, rtol=2e-5)

    def check_rounded(self, plan, q):
        """Weights are rounded to bfloat16, by 2^-8 at most, and queries once they are turned and scaled."""
        # Queries that scaling makes bfloat16: only where they are turned, too, is anything rounded.
        scale = math.log2(math.e) / math.sqrt(self.dim)
        q = (q * scale).bfloat16().float() / scale
        rounding = 2**-5 if any(span.shift for span in plan.spans) else 2**-8
        sizes = SimpleNamespace(k=self.pool.k, v=self.pool.v.abs(), page_size=self.pool.page_size)
        error = (self.run(plan, q).double() - self.plain(plan, q)).abs()
        assert (error <= rounding * dense_attention(plan, q, sizes, self.rope) + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "threads"), [(1, 2), (4, 1), (16, 2)])
@pytest.mark.parametrize(
    ("rows", "length"), [(1, 1), (1, 13), (1, 1999), (5, 5), (8, 70), (64, 64), (65, 200), (150, 513)]
)
def test_causal_request(library, dtype, threads, page_size, rows, length):
    world = World(library, page_size=page_size, dtype=dtype, threads=threads)
    plan = AttentionPlan(rows)
    world.causal(plan, slice(0, rows), length)
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 6, 8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (200, 1)])
def test_any_shape_of_heads(library, dtype, dim, heads, kv_heads):
    world = World(library, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, rows=400)
    plan = AttentionPlan(5)
    plan.add(slice(0, 5), world.span(70))
    world.causal(plan, slice(0, 5), 9)
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (7, 1)])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 257, 700])
def test_decode_reads_keys_in_place(library, dtype, heads, kv_heads, length):
    world = World(library, page_size=16, heads=heads, kv_heads=kv_heads, dim=64, dtype=dtype)
    plan = AttentionPlan(3)
    plan.add(slice(0, 2), world.span(33))
    for row in range(3):
        world.causal(plan, slice(row, row + 1), length + row, shift=5 * row)
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_count_once(library, dtype):
    """In rows of one part and of several, and in one that sees nothing."""
    world = World(library, page_size=16, dim=64, dtype=dtype)
    world.sinks = torch.tensor([-80.0, -3.0, 0.0, 2.5, 6.0, 80.0])
    plan = AttentionPlan(40)
    plan.add(slice(0, 2), world.span(700))
    for row in range(3):
        world.causal(plan, slice(row, row + 1), 1 + 300 * row)
    world.causal(plan, slice(3, 39), 1500)
    world.check(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sharing", [2, 7, 64, 100])
def test_shared_span_with_private_tails(library, dtype, threads, sharing):
    world = World(library, threads=threads, dtype=dtype)
    plan = AttentionPlan(sharing)
    plan.add(slice(0, sharing), world.span(1000))
    for row in range(sharing):
        world.causal(plan, slice(row, row + 1), 1 + row % 9)
    world.check(plan)


@pytest.mark.parametrize("seen", [0, 1, 63, 64, 300])
def test_rows_that_see_the_same_prefix(library, seen):
    world = World(library, dim=64)
    plan = AttentionPlan(80)
    plan.add(slice(0, 2), world.span(300), np.full(2, seen, dtype=np.int32))
    plan.add(slice(0, 80), world.span(301), np.full(80, seen, dtype=np.int32))
    world.check(plan)


def test_scores_that_exp_cannot_take(library):
    """Scores in the hundreds: only differences to the largest may be exponentiated."""
    world = World(library)
    world.pool.k.mul_(100)
    plan = AttentionPlan(7)
    world.causal(plan, slice(0, 7), 800)
    q = torch.randn(7, world.heads, world.dim)
    torch.testing.assert_close(world.run(plan, q).double(), world.plain(plan, q), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16)])
@pytest.mark.parametrize("length", [5, 80, 513, 1100, 2128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_bits_in_every_company(library, heads, kv_heads, dim, length, dtype):
    """Alone, in a chunk, or behind a prefix that others share; by any number of threads."""
    if dtype == torch.bfloat16 and not library.multiplies_pairs:
        pytest.skip("of bfloat16, only pairs are summed in one order")
    world = World(library, page_size=16, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    rows, span = min(length, 70), world.span(length)
    q = world.draw(rows, heads, dim)

    def run(rows, shared, threads):
        """These rows behind `shared` tokens that they read together; the rest of the span each reads alone."""
        world.threads, plan = threads, AttentionPlan(len(rows))
        if shared:
            plan.add(slice(0, len(rows)), Span(span.pages[: shared // 16], shared))
        for i, row in enumerate(rows):
            seen = length - len(q) + 1 + row - shared
            plan.add(slice(i, i + 1), Span(span.pages[shared // 16 :], seen, position=shared))
        return world.run(plan, q[rows])

    def chunks(shared, threads):
        """All rows behind `shared` tokens that they read together; two runs of them read the rest."""
        world.threads, plan = threads, AttentionPlan(rows)
        plan.add(slice(0, rows), Span(span.pages[: shared // 16], shared))
        for some in (slice(0, 41), slice(41, rows)):
            seen = causal_visible(length - shared, rows)[some]
            plan.add(some, Span(span.pages[shared // 16 :], int(seen[-1]), position=shared), seen)
        return world.run(plan, q)

    plan = AttentionPlan(rows)
    plan.add(slice(0, rows), span, causal_visible(length, rows))
    wanted = world.run(plan, q)
    for threads in (1, 2, 5):
        for row in range(0, rows, 23):
            assert torch.equal(run([row], 0, threads)[0], wanted[row])
        for shared in (64, 192, 512, 1088):
            some = [0, 3, 30, 69]
            if shared < length - rows:
                assert torch.equal(run(some, shared, threads), wanted[some])
                assert torch.equal(chunks(shared, threads), wanted)


def test_runs_of_rows_that_see_no_key_are_zero(library):
    world, plan = World(library, page_size=16, heads=14, kv_heads=2, dim=64), AttentionPlan(80)
    for _ in "12":
        plan.add(slice(0, 40), world.span(100))
    for _ in "12":
        plan.add(slice(40, 80), world.span(90), np.zeros(40, np.int32))
    world.check(plan)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (4, 4, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_read_many_spans_get_the_same_bits_in_every_company(library, heads, kv_heads, dim, dtype):
    """As with documents: together, each run of rows alone, and beside a row that is not read in one run with them."""
    if dtype == torch.bfloat16 and not library.multiplies_pairs:
        pytest.skip("of bfloat16, only pairs are summed in one order")
    world = World(library, page_size=16, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    rows, q = 120, world.draw(120, heads, dim)
    lengths = [70, 300, 64, 1, 1100, 257, 33, 128]
    # Each span is read by all rows from one on; some have a shift, one a mask, one is read causally.
    reads = [(9 * i, world.span(length, shift=i % 3 * 40)) for i, length in enumerate(lengths)]
    reads[2][1].keep = torch.arange(64) % 3 != 1
    own = world.span(200)

    def run(first, last, threads, others=()):
        world.threads, plan = threads, AttentionPlan(last - first + len(others))
        for start, span in reads:
            if (mine := max(start - first, 0)) < last - first:
                seen = list(range(mine, last - first)) + [
                    last - first + i for i, row in enumerate(others) if row >= start
                ]
                together = len(seen) == plan.num_rows - mine
                plan.add(slice(mine, plan.num_rows) if together else torch.tensor(seen), span)
        visible = causal_visible(200, rows) if rows > 1 else None
        plan.add(slice(0, plan.num_rows), own, np.concatenate((visible[first:last], visible[list(others)])))
        return world.run(plan, q[[*range(first, last), *others]])

    wanted = run(0, rows, 2)
    for threads in (1, 2, 64):  # for 64, there are too few rows to read each span in one piece
        assert torch.equal(run(0, rows, threads), wanted)
        for first, last in [(0, 1), (30, 31), (17, 60), (60, 120), (119, 120)]:
            assert torch.equal(run(first, last, threads), wanted[first:last])
        assert torch.equal(run(20, 100, threads, [0, 119]), wanted[[*range(20, 100), 0, 119]])


def test_a_span_may_have_several_edges(library):
    world = World(library)
    plan = AttentionPlan(8)
    plan.add(slice(0, 3), world.span(90))
    plan.edges.append(Edge(slice(5, 8), 0, causal_visible(90, 3)))
    world.check(plan)


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(library, seed):
    dtype = [torch.float32, torch.bfloat16][seed // 2 % 2]
    world = World(library, seed=seed, dtype=dtype, page_size=[1, 4, 16][seed % 3], threads=1 + seed % 2)
    world.check(random_plan(world.pages, int(world.random.integers(1, 100)), [60, 900][seed % 2]))
