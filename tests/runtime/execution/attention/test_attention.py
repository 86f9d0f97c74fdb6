"""The attention interface against plain softmax attention over explicitly moved keys."""

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, Span, causal_visible
from runtime.execution.attention.fused import FusedAttention
from runtime.execution.attention.paged_index import by_call
from runtime.execution.attention.torch_attention import TorchAttention
from tests.runtime.execution.attention import dense
from tests.runtime.execution.attention.dense import dense_attention, random_plan

HEADS, KV_HEADS, DIM = 6, 2, 16


class World(dense.World):
    """Over torch's backend."""

    def __init__(self, seed: int, rows: int = 800, page_size: int = 4, kind: type[TorchAttention] = TorchAttention):
        super().__init__(seed, rows, page_size, KV_HEADS, DIM)
        self.backend = kind(self.pool, self.rope)

    def check(self, plan: AttentionPlan) -> None:
        q = self.draw(plan.num_rows, HEADS, DIM)
        got = self.backend.run(self.backend.prepare(plan), q, 0)
        torch.testing.assert_close(got.double(), dense_attention(plan, q, self.pool, self.rope), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("start", "stop"), [(0, 640), (5, 640), (130, 387), (0, 1)])
def test_long_extents_are_read_as_views(start, stop):
    """Two extents that are far apart: no gather, and the rows are those of the span."""
    world = World(7)
    pages = np.concatenate((np.arange(100, 180), np.arange(0, 80))).astype(np.int32)
    span = Span(pages, stop)
    pieces = world.backend._pieces(span, start, stop)
    assert all(isinstance(piece, slice) for piece in pieces)
    read = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])
    assert read.tolist() == [int(pages[i // 4]) * 4 + i % 4 for i in range(start, stop)]
    plan = AttentionPlan(stop - start)
    plan.add(slice(0, stop - start), span, causal_visible(stop, stop - start))
    world.check(plan)


def test_only_what_some_rows_do_not_see_is_under_a_mask():
    world = World(8)
    plan = AttentionPlan(3)
    plan.add(slice(0, 3), world.span(300, False), np.array([299, 290, 300], dtype=np.int32))
    masked, whole = world.backend.prepare(plan)
    assert masked.bias.shape == (3, 10)
    assert whole.slots == slice(0, 290)
    world.check(plan)


@pytest.mark.parametrize("kind", [TorchAttention, FusedAttention])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(30))
def test_random_plans(seed, page_size, kind):
    world = World(seed + 50, page_size=page_size, kind=kind)
    world.check(random_plan(world.pages, int(world.random.integers(1, 12)), 60))


def test_edges_are_cut_into_as_little_under_a_mask_as_whole_pages_allow():
    plan = AttentionPlan(4)
    span = Span(np.arange(10, 20, dtype=np.int32), 38)
    plan.add(slice(0, 4), span, causal_visible(38, 4))
    plan.add(slice(0, 4), span, np.array([7, 8, 9, 10], dtype=np.int32))
    plan.add(slice(0, 4), span, np.array([17, 30, 15, 17], dtype=np.int32))
    plan.add(slice(0, 4), span, np.full(4, 5, dtype=np.int32))
    plan.add(slice(2, 3), span)
    plan.add(slice(2, 4), span, np.zeros(2, dtype=np.int32))
    calls = by_call(plan, 4)
    found = {call: [(len(s.pages), int(s.pages[0]), s.length) for s in part.spans] for call, part in calls.items()}
    assert found == {
        "full": [(3, 10, 12), (2, 10, 5)],
        "causal": [(10, 10, 38), (3, 10, 10), (10, 10, 38)],
        "masked": [(5, 13, 18)],
    }
    assert calls["masked"].edges[0].visible.tolist() == [5, 18, 3, 5]
