"""Decode steps as CUDA graphs: one launch instead of several hundred, for a ladder of batch sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.batch import ForwardBatch
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.graph_calls import DecodePlan, GraphCalls, decode_plan
from runtime.execution.llama import Attend, LlamaModel
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool

# Page table entries that a call of a graph has room for: 16 MiB of them.
_MOST_PAGES = 1 << 22

# Combinations of layer groups for which graphs are captured: each takes memory, once for every size.
_MOST_LAYOUTS = 8


class GroupShape(NamedTuple):
    """Properties of a layer group that are fixed in a graph.

    Attributes:
        layers: indices of the layers.
        shared: whether rows read other spans than their own.
        shifted: whether some of these are shifted.
    """

    layers: range
    shared: bool
    shifted: bool


class DecodeGraph:
    """A decode step of up to `size` rows with fixed buffers.

    Rows that a step does not have compute some token into the pool's spare page.
    """

    def __init__(
        self,
        model: LlamaModel,
        pool: KVPool,
        backend: FlashInferAttention,
        size: int,
        shapes: Sequence[GroupShape],
        max_pages: int,
        memory: Any,
    ):
        """`max_pages`: see `GraphCalls`. `memory`: pool shared by all graphs, as one runs at a time."""
        self.size, self._memory = size, memory
        self._model, self._pool, self._backend = model, pool, backend
        device = pool.k.device
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        # Positions, and the slots of each group, in one transfer.
        self._places = torch.zeros(1 + len(shapes), size, dtype=torch.int64, device=device)
        self._groups: list[tuple[range, GraphCalls, Attend]] = []
        for shape, slots in zip(shapes, self._places[1:], strict=True):
            calls = GraphCalls(backend, size, shape.shared, shape.shifted, max_pages)
            self._groups.append((shape.layers, calls, Attend(pool, backend, calls.calls, slots, None)))
        self._replay: Callable[[], torch.Tensor] | None = None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, plans: Sequence[DecodePlan]) -> torch.Tensor:
        """Run a step whose plans fit; float32 logits [rows, vocab], overwritten by the next step."""
        with self._backend.planning():
            for (_, calls, _), plan in zip(self._groups, plans, strict=True):
                calls.plan(plan)
        rows, spare = len(batch.tokens), self._pool.num_pages * self._pool.page_size
        places = torch.full(self._places.shape, spare)
        places[0] = 0
        places[0, :rows] = batch.positions
        for slots, group in zip(places[1:], batch.groups, strict=True):
            slots[:rows] = group.kv_write.where(group.kv_write >= 0, spare)
        self._places.copy_(upload(places, self._places.device), non_blocking=True)
        # Already on the device if an earlier step chose them and the host has not read them.
        self._tokens[:rows].copy_(upload(batch.tokens, self._tokens.device), non_blocking=True)
        if self._replay is None:
            self._replay = capture(self._compute, self._memory, self._tokens.device)
        return self._replay()[:rows]

    def _compute(self) -> torch.Tensor:
        hidden = F.embedding(self._tokens, self._model.embedding)
        for layers, _, attend in self._groups:
            hidden = self._model.run_layers(layers, hidden, self._places[0], attend)
        return self._model.logits(hidden)


class DecodeGraphs:
    """Decode graphs for a ladder of batch sizes, each captured when it is first used.

    A step runs without a graph if
    - a layer group does not have all rows, or loads or saves hidden states;
    - it does not want the logits of all rows in their order;
    - it has more rows than the largest size, or more page table entries than a graph;
    - a row reads more than two spans besides its own, or all rows together more than the largest size;
    - `decode_plan` cannot split the plan of a group;
    - graphs were captured for `_MOST_LAYOUTS` other combinations of layer groups.
    """

    def __init__(
        self, model: LlamaModel, pool: KVPool, backend: FlashInferAttention, sizes: Sequence[int], context_length: int
    ):
        self._model, self._pool, self._backend = model, pool, backend
        self.sizes = sorted(sizes)
        self._pages_of_one = -(-context_length // pool.page_size) + 1
        self._memory = torch.cuda.graph_pool_handle() if pool.k.is_cuda else None
        self._layouts: set[tuple[GroupShape, ...]] = set()
        self._graphs: dict[tuple[int, tuple[GroupShape, ...]], DecodeGraph] = {}

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """`DecodeGraph.run` of the smallest graph that fits; None if the step has to run without one."""
        rows = len(batch.tokens)
        if rows > self.sizes[-1] or not torch.equal(batch.logits_rows, torch.arange(rows)):
            return None
        if any(group.rows is not None or group.load or group.save for group in batch.groups):
            return None
        plans: list[DecodePlan] = []
        for group in batch.groups:
            plan = decode_plan(group.attention, self._pool.page_size)
            if plan is None:
                return None
            plans.append(plan)
        for size in self.sizes[bisect_left(self.sizes, rows) :]:
            max_pages = min(size * self._pages_of_one, _MOST_PAGES)
            if all(plan.fits(size, max_pages) for plan in plans):
                graph = self._graph(size, max_pages, batch, plans)
                return None if graph is None else graph.run(batch, plans)
        return None

    def _graph(self, size: int, max_pages: int, batch: ForwardBatch, plans: Sequence[DecodePlan]) -> DecodeGraph | None:
        shapes = tuple(
            GroupShape(group.layers, bool(plan.shared.edges), plan.is_shifted)
            for group, plan in zip(batch.groups, plans, strict=True)
        )
        if shapes not in self._layouts and len(self._layouts) == _MOST_LAYOUTS:
            return None
        self._layouts.add(shapes)
        if (size, shapes) not in self._graphs:
            self._graphs[size, shapes] = DecodeGraph(
                self._model, self._pool, self._backend, size, shapes, max_pages, self._memory
            )
        return self._graphs[size, shapes]


def capture(compute: Callable[[], torch.Tensor], memory: Any, device: torch.device) -> Callable[[], torch.Tensor]:
    """Capture `compute` on `device`; the function replays it and returns its result, which stays in one place."""
    # Streams are made on the current device, which each thread has for itself.
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Twice: kernels are loaded and workspaces allocated, which a graph may not do.
            compute()
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Reasoning steps are compared in another thread, whose allocations are no part of the capture.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
