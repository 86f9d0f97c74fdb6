"""Decode steps with fixed buffers: filled up, replayed, with and without shared pages, against the model without."""

import sys

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.graphs import DecodeGraphs
from runtime.execution.llama import LlamaModel
from runtime.execution.ops import FlashInferOps
from runtime.kv.pool import KVPool
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_weights
from tests.runtime.execution.attention.stand_in import stand_in
from tests.runtime.execution.attention.whole_engines import check_whole_engines

PAGE = 4


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    monkeypatch.setattr("runtime.execution.graphs.capture", recorded)
    return torch.device("cpu")


def recorded(compute, memory, device):
    """As a graph: what was captured runs again on the same buffers, and its result stays in one place."""
    result = compute()

    def replay():
        result.copy_(compute())
        return result

    return replay


class World:
    def __init__(self, path, device, sizes):
        self.spec = ModelSpec.load(path)
        weights = load_weights(path, self.spec, torch.float32)
        self.model = LlamaModel(self.spec, weights, device, FlashInferOps(512))
        spec = self.spec
        self.pool = KVPool(
            spec.num_layers, 300, PAGE, spec.num_kv_heads, spec.head_dim, torch.float32, device, spare_pages=1
        )
        self.pool.k.normal_()
        self.pool.v.normal_()
        self.backend = FlashInferAttention(self.pool, self.model.rope, spec.num_heads, torch.float32)
        self.graphs = DecodeGraphs(self.model, self.pool, self.backend, sizes, 200)
        self.free = torch.randperm(300).tolist()

    def pages(self, tokens: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(-(-tokens // PAGE))], dtype=np.int32)

    def batch(self, rows: int, shared=()) -> ForwardBatch:
        """Requests with pages of their own, and stretches (first row, last row, pages) that are shared."""
        plan = AttentionPlan(rows)
        for first, last, pages in shared:
            plan.add(slice(first, last), Span(self.pages(pages * PAGE), pages * PAGE))
        slots = []
        for row in reversed(range(rows)):  # the planner's order is not that of the rows
            length = 1 + (7 * row) % 23
            span = Span(self.pages(length), length)
            plan.add(slice(row, row + 1), span)
            slots.insert(0, int(span.pages[-1]) * PAGE + (length - 1) % PAGE)
        tokens = torch.arange(100, 100 + rows)
        group = LayerGroup(range(self.spec.num_layers), None, torch.tensor(slots), plan)
        return ForwardBatch(tokens, torch.arange(rows) * 3 + 5, [group], torch.arange(rows))

    def check(self, batch: ForwardBatch) -> None:
        before = self.pool.k.clone(), self.pool.v.clone()
        wanted = self.model.forward(batch, self.pool, self.backend).clone()
        after = self.pool.k.clone(), self.pool.v.clone()
        self.pool.k.copy_(before[0])
        self.pool.v.copy_(before[1])
        graph = self.graphs.find(batch)
        assert graph is not None
        got = graph.run(batch)
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        spare = 300 * PAGE
        for found, want in zip((self.pool.k, self.pool.v), after, strict=True):
            torch.testing.assert_close(found[:, :spare], want[:, :spare], atol=1e-5, rtol=1e-4)


def test_steps_of_any_size_are_filled_up(tiny_dir, device):
    world = World(tiny_dir, device, [1, 2, 8])
    for rows in (1, 2, 5, 8, 3, 1):
        world.check(world.batch(rows))
    assert {key for key in world.graphs._graphs} == {(1, False), (2, False), (8, False)}


def test_shared_pages_of_two_levels(tiny_dir, device):
    world = World(tiny_dir, device, [2, 8])
    for rows, shared in (
        (2, [(0, 2, 3)]),
        (6, [(0, 6, 5)]),
        (8, [(0, 8, 4), (0, 3, 2), (5, 8, 1)]),
        (5, [(1, 3, 2)]),
        (7, [(0, 2, 1), (2, 4, 1), (4, 7, 6)]),
    ):
        world.check(world.batch(rows, shared))
    assert {key for key in world.graphs._graphs} == {(2, True), (8, True)}


def test_what_is_no_decode_step_or_has_no_room_is_left_alone(tiny_dir, device):
    world = World(tiny_dir, device, [4])
    find = world.graphs.find
    assert find(world.batch(5)) is None, "larger than the ladder"
    assert find(world.batch(4, [(0, 4, 1), (0, 3, 1), (0, 2, 1)])) is None, "deeper than two levels"
    prefill = world.batch(2)
    prefill.groups[0].attention.edges[0].rows = slice(0, 2)
    assert find(prefill) is None
    shifted = world.batch(2)
    shifted.groups[0].attention.spans[0].shift = 3
    assert find(shifted) is None
    silent = world.batch(2)
    silent.logits_rows = silent.logits_rows[:1]
    assert find(silent) is None
    two = world.batch(2)
    two.groups = two.groups * 2
    assert find(two) is None


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_whole_engine_gives_torchs_tokens(tiny_dir, device, monkeypatch, overlap):
    graphs = check_whole_engines(tiny_dir, monkeypatch, step_tokens=64, overlap=overlap)._graphs
    assert {shared for (_, shared), graph in graphs._graphs.items() if graph._replay} >= {True}
