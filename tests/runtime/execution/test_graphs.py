"""Steps with fixed buffers: padded and replayed, against the model without graphs."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, HiddenRows, LayerGroup, Span, causal_visible
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.graphs import StepGraphs
from runtime.execution.ops import FlashInferOps
from runtime.execution.torch_decoder import TorchDecoder
from runtime.kv.pool import KVPool
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.runtime.execution.attention.stand_in import stand_in
from tests.runtime.execution.attention.whole_engines import check_whole_engines

PAGE = 4
SPARE = 300  # the pool's pages, before the one for unused rows


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
    def __init__(self, path, device, sizes, prompt_sizes=(), page_size=PAGE):
        self.spec = DecoderSpec.load(path)
        weights = load_weights(path, self.spec, torch.float32)
        self.model = TorchDecoder(self.spec, weights, device, FlashInferOps(512))
        spec = self.spec
        self.page_size = page_size
        shape = (spec.num_layers, SPARE, page_size, spec.num_kv_heads, spec.head_dim)
        self.pool = KVPool(*shape, torch.float32, device, spare_pages=1)
        self.pool.k.normal_()
        self.pool.v.normal_()
        self.backend = FlashInferAttention(self.pool, self.model.rope, spec.num_heads, torch.float32)
        self.graphs = StepGraphs(self.model, self.pool, self.backend, sizes, prompt_sizes, 200)
        self.free = torch.randperm(SPARE).tolist()

    def pages(self, tokens: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(-(-tokens // self.page_size))], dtype=np.int32)

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

    def prompts(self, counts, cached: int = 0, shared=(), wanted=None) -> ForwardBatch:
        """A step of requests with any number of rows, behind cached tokens of their own; `shared`: see `plan`.

        wanted: rows whose logits are computed; None: the last one of each request.
        """
        stops = np.cumsum(counts).tolist()
        plan, slots = AttentionPlan(stops[-1]), []
        for readers, pages, shift in shared:
            plan.add(readers, Span(self.pages(pages * self.page_size), pages * self.page_size, shift))
        for count, stop in zip(counts, stops, strict=True):
            span = Span(self.pages(cached + count), cached + count)
            plan.add(slice(stop - count, stop), span, causal_visible(span.length, count))
            rows = np.arange(cached, cached + count)
            slots += (span.pages[rows // self.page_size] * self.page_size + rows % self.page_size).tolist()
        tokens = torch.arange(stops[-1]) % 50 + 100
        group = LayerGroup(range(self.spec.num_layers), None, torch.tensor(slots), plan)
        chosen = torch.tensor([stop - 1 for stop in stops] if wanted is None else wanted, dtype=torch.int64)
        return ForwardBatch(tokens, torch.arange(stops[-1]) * 2 + 5, [group], chosen)

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
        spare = SPARE * self.page_size
        for found, want in zip((self.pool.k, self.pool.v), after, strict=True):
            torch.testing.assert_close(found[:, :spare], want[:, :spare], atol=1e-5, rtol=1e-4)


def test_steps_of_any_size_are_padded(ids_dir, device):
    world = World(ids_dir, device, [1, 2, 8])
    for rows in (1, 2, 5, 8, 3, 1):
        world.check(world.batch(rows))
    unwritten = world.batch(3)
    unwritten.groups[0].kv_write[0] = -1
    world.check(unwritten)
    assert {shape.rows.size for shape in world.graphs._graphs} == {1, 2, 8}


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
    assert {shape.rows.size for shape in world.graphs.shapes(1)} == {1}, "no more rows than requests run"
    for shape in world.graphs.shapes(3):
        world.graphs.capture(shape)
    captured = dict(world.graphs._graphs)
    assert [(shape.rows.size, shape.calls[0].levels) for shape in captured] == [(4, 1), (4, 0), (1, 0)]
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


# Rows of each request, cached tokens of each, and the rows of the graph.
PROMPTS = {
    "one prompt": ([5], 0, 8),
    "the graph is full": ([8], 0, 8),
    "one row over": ([9], 0, 16),
    "behind cached tokens": ([7], 21, 8),
    "beside decoding requests": ([1, 1, 5], 13, 8),
    "as many requests as the graph has": ([2, 2, 2, 2], 6, 8),
    "no request for the unused rows": ([1, 2, 2, 2], 6, 16),
    "drafts": ([3, 1, 4], 9, 8),
}


@pytest.mark.parametrize("page_size", [1, PAGE, 16])
@pytest.mark.parametrize("case", PROMPTS)
def test_requests_with_any_number_of_rows(ids_dir, device, case, page_size):
    counts, cached, size = PROMPTS[case]
    world = World(ids_dir, device, [1], [8, 16], page_size)
    for wanted in (None, range(sum(counts)), [], [sum(counts) - 1, 0]):
        world.check(world.prompts(counts, cached, wanted=wanted))
    assert [(shape.rows.size, shape.rows.decodes) for shape in world.graphs._graphs] == [(size, False)]


@pytest.mark.parametrize("case", SHARED)
def test_prompts_share_pages_in_a_graph(ids_dir, device, case):
    """Of each of two requests, several rows."""
    rows, shared, levels = SHARED[case]
    world = World(ids_dir, device, [1], [16])
    several = [(slice(2 * first, 2 * stop), pages, 0) for first, stop, pages in shared]
    for counts in ([2] * rows, [4, 2] + [2] * (rows - 3) if rows > 3 else [4]):
        world.check(world.prompts(counts, 3, several))
        world.check(world.prompts(counts, 5))
    assert {shape.calls[0].levels for shape in world.graphs._graphs} == {0, levels}
    assert len(world.graphs._graphs) == 2


def test_decode_steps_that_no_graph_of_theirs_fits_run_as_prompts(ids_dir, device):
    world = World(ids_dir, device, [4], [16, 64])
    world.check(world.batch(3))
    world.check(world.batch(5))
    world.check(world.batch(30))
    assert [(shape.rows.size, shape.rows.decodes) for shape in world.graphs._graphs] == [
        (4, True), (16, False), (64, False),
    ]  # fmt: skip


def test_other_steps_with_prompts_run_without_a_graph(ids_dir, device):
    world = World(ids_dir, device, [1], [8, 16, 128])
    run = world.graphs.run
    assert run(world.prompts([129])) is None, "larger than the ladder"
    assert run(world.prompts([2] * 10, wanted=[0] * 65)) is None, "more logits than a graph has"
    assert run(world.prompts([1] * 63 + [2, 1])) is None, "more requests than a graph has"
    part = world.prompts([4], 6)
    part.groups[0].attention.edges[0].visible -= 1
    assert run(part) is None, "the last row sees less than the span"
    several = world.prompts([4], 6)
    several.groups[0].attention.edges[0].visible[0] = 3
    assert run(several) is None, "not causal"
    doubled = world.prompts([4], 6)
    doubled.groups[0].attention.add(slice(3, 4), Span(world.pages(2), 2))
    assert run(doubled) is None, "a row reads two spans"
    thinned = world.prompts([4], 6)
    thinned.groups[0].attention.spans[0].keep = torch.arange(10) != 2
    assert run(thinned) is None
    shifted = world.prompts([4], 6)
    shifted.groups[0].attention.spans[0].shift = 2
    assert run(shifted) is None
    hidden = world.prompts([4], 6)
    hidden.groups[0].attention.edges[0].hidden = np.array([1, 0, 3, 0], dtype=np.int32)
    assert run(hidden) is None, "no window"
    assert not world.graphs._graphs


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_whole_engine_gives_torchs_tokens(tiny_dir, device, monkeypatch, overlap):
    graphs = check_whole_engines(tiny_dir, monkeypatch, step_tokens=64, overlap=overlap).decoder.graphs
    captured = [shape for shape, graph in graphs._graphs.items() if graph._replay]
    assert {shape.calls[0].levels for shape in captured} >= {0, 1}
