"""Decode steps with fixed buffers: padded and replayed, against the model without graphs."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, HiddenRows, LayerGroup, Span
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.graphs import DecodeGraphs
from runtime.execution.llama import LlamaModel
from runtime.execution.ops import FlashInferOps
from runtime.kv.pool import KVPool
from runtime.models.spec import LlamaSpec
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
        self.spec = LlamaSpec.load(path)
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

    def plan(self, rows: int, shared=(), alone=()) -> AttentionPlan:
        """Requests with pages of their own, and what they read besides.

        Args:
            rows: one of each request.
            shared: (rows, pages, shift) of spans that several rows read.
            alone: (row, rows of the span, shift) of spans that one row reads besides its own.
        """
        plan = AttentionPlan(rows)
        for readers, pages, shift in shared:
            plan.add(readers, Span(self.pages(pages * PAGE), pages * PAGE, shift))
        for row, length, shift in alone:
            plan.add(slice(row, row + 1), Span(self.pages(length), length, shift))
        for row in reversed(range(rows)):  # the planner's order is not that of the rows
            length = 1 + (7 * row) % 23
            plan.add(slice(row, row + 1), Span(self.pages(length), length))
        return plan

    def batch(self, rows: int, shared=(), alone=()) -> ForwardBatch:
        plan = self.plan(rows, shared, alone)
        slots = []
        for span in reversed(plan.spans[-rows:]):
            slots.append(int(span.pages[-1]) * PAGE + (span.length - 1) % PAGE)
        tokens = torch.arange(100, 100 + rows)
        group = LayerGroup(range(self.spec.num_layers), None, torch.tensor(slots), plan)
        return ForwardBatch(tokens, torch.arange(rows) * 3 + 5, [group], torch.arange(rows))

    def check(self, batch: ForwardBatch) -> None:
        before = self.pool.k.clone(), self.pool.v.clone()
        wanted = self.model.forward(batch, self.pool, self.backend).clone()
        after = self.pool.k.clone(), self.pool.v.clone()
        self.pool.k.copy_(before[0])
        self.pool.v.copy_(before[1])
        got = self.graphs.run(batch)
        assert got is not None
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
        spare = 300 * PAGE
        for found, want in zip((self.pool.k, self.pool.v), after, strict=True):
            torch.testing.assert_close(found[:, :spare], want[:, :spare], atol=1e-5, rtol=1e-4)


def test_steps_of_any_size_are_padded(ids_dir, device):
    world = World(ids_dir, device, [1, 2, 8])
    for rows in (1, 2, 5, 8, 3, 1):
        world.check(world.batch(rows))
    unwritten = world.batch(3)
    unwritten.groups[0].kv_write[0] = -1
    world.check(unwritten)
    assert {shape.size for shape in world.graphs._graphs} == {1, 2, 8}


SHARED = {
    "one level over all rows": (8, [(0, 8, 5)], 1),
    "one level over some rows": (7, [(2, 5, 3)], 1),
    "several spans": (8, [(0, 3, 2), (3, 5, 4), (6, 8, 1)], 1),
    "a tree": (8, [(0, 8, 6), (0, 3, 2), (3, 7, 3), (1, 3, 4)], 3),
    "two rows": (2, [(0, 2, 2)], 1),
    "beside a tree": (6, [(0, 4, 2), (2, 4, 1), (4, 6, 3)], 2),
}


@pytest.mark.parametrize("case", SHARED)
def test_rows_share_pages_in_a_graph(ids_dir, device, case):
    rows, shared, levels = SHARED[case]
    world = World(ids_dir, device, [2, 8])
    for _ in range(2):
        world.check(world.batch(rows, [(slice(first, stop), pages, 0) for first, stop, pages in shared]))
        world.check(world.batch(rows))
    assert {shape.calls[0].levels for shape in world.graphs._graphs} == {0, levels}
    assert len(world.graphs._graphs) == 2, "the second step has the graph of the first"


def test_a_shared_page_in_part(ids_dir, device):
    world = World(ids_dir, device, [4])
    batch = world.batch(4, [(slice(0, 3), 3, 0)])
    batch.groups[0].attention.spans[0].length -= 2
    world.check(batch)


def test_a_graph_serves_other_steps_than_it_was_captured_for(ids_dir, device):
    """Rows that shared pages share none now, and the other way round; the results of the earlier step remain unused."""
    world = World(ids_dir, device, [8])
    for shared in ([(0, 4, 5)], [(4, 8, 2)], [(2, 7, 1)], [(0, 2, 1), (2, 4, 1), (5, 8, 7)]):
        world.check(world.batch(8, [(slice(first, stop), pages, 0) for first, stop, pages in shared]))
    assert len(world.graphs._graphs) == 1


def test_graphs_are_captured_before_the_first_step(ids_dir, device):
    world = World(ids_dir, device, [1, 4])
    assert {shape.size for shape in world.graphs.shapes(1)} == {1}, "no more rows than requests run"
    for shape in world.graphs.shapes(3):
        world.graphs.capture(shape)
    captured = dict(world.graphs._graphs)
    assert [(shape.size, shape.calls[0].levels) for shape in captured] == [(4, 1), (4, 0), (1, 0)]
    world.check(world.batch(3))
    world.check(world.batch(1))
    world.check(world.batch(4, [(slice(1, 4), 2, 0)]))
    assert world.graphs._graphs == captured


def test_other_steps_run_without_a_graph(ids_dir, device):
    world = World(ids_dir, device, [8])
    assert world.graphs.run(world.batch(9)) is None, "larger than the ladder"
    deep = [(slice(0, 4), 1, 0)] * 4
    assert world.graphs.run(world.batch(4, deep)) is None, "four levels"
    scattered = [(slice(1, 3), 1, 0), (slice(4, 6), 1, 0)]
    assert world.graphs.run(world.batch(7, scattered)) is None, "five edges, three of them of rows that share nothing"
    assert world.graphs.run(world.batch(4, [(torch.tensor([0, 2]), 1, 0)])) is None, "the rows are no neighbours"
    assert world.graphs.run(world.batch(4, [(slice(0, 4), 1, 3)])) is None, "shifted"
    assert world.graphs.run(world.batch(4, alone=[(3, 5, 0)])) is None, "a row reads two spans"
    prefill = world.batch(2)
    prefill.groups[0].attention.edges[0].rows = slice(0, 2)
    assert world.graphs.run(prefill) is None, "two rows read one span"
    shifted = world.batch(2)
    shifted.groups[0].attention.spans[0].shift = 3
    assert world.graphs.run(shifted) is None, "a row reads a shifted span"
    thinned = world.batch(2)
    own = thinned.groups[0].attention.spans[0]
    own.keep = torch.arange(own.length) != 0
    assert world.graphs.run(thinned) is None
    silent = world.batch(2)
    silent.logits_rows = silent.logits_rows[:1]
    assert world.graphs.run(silent) is None
    turned = world.batch(2)
    turned.logits_rows = turned.logits_rows.flip(0)
    assert world.graphs.run(turned) is None
    several = world.batch(2)
    several.groups = [*several.groups, replace(several.groups[0], kv_write=several.groups[0].kv_write.clone())]
    assert world.graphs.run(several) is None, "layer groups that write other slots"
    fewer = world.batch(2)
    fewer.groups[0].rows = torch.tensor([0, 1])
    assert world.graphs.run(fewer) is None
    saving = world.batch(2)
    saving.groups[0].save.append(HiddenRows(torch.tensor([0]), torch.empty(1, world.spec.hidden_size)))
    assert world.graphs.run(saving) is None
    assert not world.graphs._graphs


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_whole_engine_gives_torchs_tokens(tiny_dir, device, monkeypatch, overlap):
    graphs = check_whole_engines(tiny_dir, monkeypatch, step_tokens=64, overlap=overlap)._graphs
    captured = [shape for shape, graph in graphs._graphs.items() if graph._replay]
    assert {shape.calls[0].levels for shape in captured} >= {0, 1}
