"""Decode steps as CUDA graphs: one launch instead of several hundred."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.batch import ForwardBatch
from runtime.execution.attention.decode_step import DecodeStep, decode_step
from runtime.execution.attention.flashinfer import Call, FlashInferAttention, GroupCalls
from runtime.execution.attention.paged_index import PagedIndex
from runtime.execution.attention.windows import windowed
from runtime.execution.device import is_lost
from runtime.execution.llama import LlamaModel
from runtime.execution.mixers.mixer import Attend
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool

log = logging.getLogger("ramet.engine")

# Most page table entries of a call in a graph; they take 16 MiB.
_MAX_PAGES = 1 << 22

# FlashInfer's plan of a call in a graph takes less.
_PLAN_BYTES = 1 << 20

# Most levels of shared spans, and most virtual requests for them, in a graph.
_MAX_LEVELS, _MAX_EDGES = 3, 32


class CallShape(NamedTuple):
    """What the attention of a layer group in a graph cannot change: levels, and window, of its `DecodeStep`s."""

    levels: int
    window: int | None = None


class GraphShape(NamedTuple):
    """What a graph cannot change.

    Attributes:
        size: number of rows.
        calls: the attention plans.
        groups: the layers of each layer group, and the index of its plan.
    """

    size: int
    calls: tuple[CallShape, ...]
    groups: tuple[tuple[range, int], ...]


class Buffers:
    """Memory that the graphs share, for one of their attention plans. It is written before each replay."""

    def __init__(self, backend: FlashInferAttention, max_pages: int):
        """`max_pages`: most page table entries of a call."""
        self.pages = {kind: _zeros(backend, max_pages, torch.int32) for kind in ("own", "shared")}
        self.plans = {kind: _zeros(backend, _PLAN_BYTES, torch.uint8) for kind in ("own", "shared")}


class GraphIndex(NamedTuple):
    """Index arrays of the calls of a layer group; None: nothing is shared."""

    own: PagedIndex
    shared: PagedIndex | None


class GraphAttention:
    """The attention of a layer group in a graph, with fixed buffers.

    A decode call reads what each row reads alone. One prefill call reads what rows share, with all rows as queries on
    each level, and a number of virtual requests that depends on the shape only. Then each level is merged in place.

    What a captured call keeps are numbers of its first plan, which do not depend on lengths: the number of virtual
    requests and of queries, and the tiles and grid that follow from them. FlashInfer splits keys over the grid in
    arrays that each plan copies to the device.

    Attributes:
        calls: the calls, which every layer uses; their buffers keep their addresses.
    """

    def __init__(self, backend: FlashInferAttention, size: int, shape: CallShape, buffers: Buffers):
        self._backend, self._size, self._shape, self._buffers = backend, size, shape, buffers
        self._own = self._make(backend.make_decode, "buffer", "own", size, size)
        own = Call(self._own, None, None)
        self._shared: Any = None
        if not shape.levels:
            self.calls = GroupCalls([own])
            return
        edges, queries = max_edges(size, shape.levels), size * shape.levels
        qo_indptr = _zeros(backend, edges + 1, torch.int32)
        self._shared = self._make(backend.make_prefill, "buf", "shared", queries, edges, qo_indptr_buf=qo_indptr)
        rows = None if shape.levels == 1 else upload(torch.arange(size).repeat(shape.levels), backend.device)
        results = backend.results(size + queries)
        own.into = results.of(slice(0, size))
        shared = Call(self._shared, rows, None, results.of(slice(size, None)))
        levels = (slice(first, first + size) for first in range(size, size + queries, size))
        self.calls = backend.merged([own, shared], 0, results, [(slice(0, size), level) for level in levels])

    def _make(
        self, make: Callable[..., Any], suffix: str, kind: str, queries: int, requests: int, **buffers: torch.Tensor
    ) -> Any:
        backend = self._backend
        backend.reserve(queries, requests)
        buffers[f"paged_kv_indptr_{suffix}"] = _zeros(backend, requests + 1, torch.int32)
        buffers[f"paged_kv_last_page_len_{suffix}"] = _zeros(backend, requests, torch.int32)
        buffers[f"paged_kv_indices_{suffix}"] = self._buffers.pages[kind]
        wrapper = make(use_cuda_graph=True, **buffers)
        wrapper.reset_workspace_buffer(backend.workspace, self._buffers.plans[kind])
        return wrapper

    def plan(self, index: GraphIndex) -> None:
        """Plan the calls of a step; call within the backend's `planning`."""
        self._backend.plan_decode(self._own, index.own, self._shape.window)
        if index.shared is not None:
            self._backend.plan_prefill(self._shared, index.shared)


def max_edges(size: int, levels: int) -> int:
    """Virtual requests of the call for what `size` rows share.

    FlashInfer cuts tiles for the longest request that leaves a query for each other one. So half as many requests as
    queries still get large tiles.
    """
    queries = size * levels
    return min(max(queries // 2, 4), queries, _MAX_EDGES)


def _zeros(backend: FlashInferAttention, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(length, dtype=dtype, device=backend.device)


class DecodeGraph:
    """A decode step of up to `size` rows with fixed buffers.

    Unused rows compute an arbitrary token and write its KV to the pool's spare page.
    """

    def __init__(
        self,
        model: LlamaModel,
        pool: KVPool,
        backend: FlashInferAttention,
        shape: GraphShape,
        buffers: Sequence[Buffers],
        memory: Any,
    ):
        """`buffers`: one for each plan. `memory`: pool that all graphs share, since only one runs at a time."""
        self._memory = memory
        self._model, self._pool, self._backend, self._groups = model, pool, backend, shape.groups
        device = pool.k.device
        self._tokens = torch.zeros(shape.size, dtype=torch.int64, device=device)
        # Positions and slots, in one transfer.
        self._places = torch.zeros(2, shape.size, dtype=torch.int64, device=device)
        calls = zip(shape.calls, buffers, strict=False)
        self._calls = [GraphAttention(backend, shape.size, one, buffer) for one, buffer in calls]
        self._attends = [Attend(pool, backend, one.calls, self._places[1], None) for one in self._calls]
        self._replay: Callable[[], torch.Tensor] | None = None

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plans: Sequence[GraphIndex]
    ) -> torch.Tensor:
        """Run a step of n rows, at most `size`. The next step overwrites the float32 logits [n, vocab].

        Args:
            tokens: int64 [n], on the host or the device.
            positions, slots: int64 [n]; a negative slot is not written.
            plans: of each of the shape's plans.
        """
        with self._backend.planning():
            for calls, index in zip(self._calls, plans, strict=True):
                calls.plan(index)
        rows, spare = len(tokens), self._pool.num_pages * self._pool.page_size
        places = torch.full(self._places.shape, spare)
        places[0] = 0
        places[0, :rows] = positions
        places[1, :rows] = slots.where(slots >= 0, spare)
        self._places.copy_(upload(places, self._places.device), non_blocking=True)
        # With overlapping steps, the tokens are already on the device.
        self._tokens[:rows].copy_(upload(tokens, self._tokens.device), non_blocking=True)
        if self._replay is None:
            self._replay = capture(self._compute, self._memory, self._tokens.device)
        return self._replay()[:rows]

    def _compute(self) -> torch.Tensor:
        hidden = F.embedding(self._tokens, self._model.embedding)
        for layers, plan in self._groups:
            hidden = self._model.run_layers(layers, hidden, self._places[0], self._attends[plan])
        return self._model.logits(hidden)


class DecodeGraphs:
    """Decode graphs for several batch sizes, and for what rows share. Each is captured when it is first used.

    A step runs without a graph if
    - its layer groups compute different rows, or load or save hidden states;
    - it does not need the logits of all rows in order;
    - it has more rows than the largest size, or more page table entries than a graph;
    - rows share spans on more levels, or more of them, than a graph has (`_MAX_LEVELS`, `max_edges`);
    - rows read shifted or thinned spans, or several alone (`decode_step`);
    - its graph could not be captured before.
    """

    def __init__(
        self, model: LlamaModel, pool: KVPool, backend: FlashInferAttention, sizes: Sequence[int], context_length: int
    ):
        self._model, self._pool, self._backend = model, pool, backend
        self.sizes = sorted(sizes)
        pages_of_one = -(-context_length // pool.page_size) + 1
        self._max_pages = min(max(self.sizes[-1], _MAX_EDGES) * pages_of_one, _MAX_PAGES)
        self._memory = torch.cuda.graph_pool_handle() if pool.k.is_cuda else None
        self._buffers: list[Buffers] = []
        self._graphs: dict[GraphShape, DecodeGraph] = {}
        self._refused: set[GraphShape] = set()

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run the smallest graph that fits, see `DecodeGraph.run`; None: the step must run without a graph."""
        rows, first = len(batch.tokens), batch.groups[0]
        if rows > self.sizes[-1] or not torch.equal(batch.logits_rows, torch.arange(rows)):
            return None
        for group in batch.groups:
            if group.rows is not None or group.load or group.save or group.kv_write is not first.kv_write:
                return None
        plans = {id(group.attention): group.attention for group in batch.groups}
        order, steps = [*plans], []
        for plan in plans.values():
            plan, _ = windowed(plan, self._pool.page_size)
            step = decode_step(plan)
            if step is None or len(step.levels) > _MAX_LEVELS:
                return None
            steps.append(step)
        groups = tuple((group.layers, order.index(id(group.attention))) for group in batch.groups)
        size = self.sizes[bisect_left(self.sizes, rows)]
        indexes = [self._index(step, size) for step in steps]
        fitting = [index for index in indexes if index is not None]
        if len(fitting) < len(indexes):
            return None
        shape = GraphShape(size, tuple(CallShape(len(step.levels), step.window) for step in steps), groups)
        if shape in self._refused:
            return None
        try:
            return self._graph(shape).run(batch.tokens, batch.positions, first.kv_write, fitting)
        except Exception as error:  # of the driver, the allocator or a kernel
            if (shape in self._graphs and self._graphs[shape].is_captured) or is_lost(self._pool.k.device):
                raise
            # The step's KV is written again without a graph. Other requests would fail with this shape too.
            log.warning("decode steps of %d rows run without a CUDA graph, which cannot be captured: %s", size, error)
            self._refused.add(shape)
            self._graphs.pop(shape, None)
            return None

    def shapes(self, most: int) -> list[GraphShape]:
        """The graphs that steps of up to `most` rows usually need, the largest first, so that others reuse its memory.

        Rows share nothing, or one level of spans.
        """
        layers = range(self._model.spec.num_layers)
        sizes = reversed(self.sizes[: bisect_left(self.sizes, most) + 1])
        return [
            GraphShape(size, (CallShape(levels),), ((layers, 0),))
            for size in sizes
            for levels in ((1, 0) if size > 1 else (0,))
        ]

    def capture(self, shape: GraphShape) -> None:
        """Capture a graph before a step needs it. It computes unused rows only."""
        steps = [DecodeStep((), [()] * call.levels, call.window) for call in shape.calls]
        indexes = [index for step in steps if (index := self._index(step, shape.size)) is not None]
        nothing = torch.empty(0, dtype=torch.int64)
        self._graph(shape).run(nothing, nothing, nothing, indexes)

    def _graph(self, shape: GraphShape) -> DecodeGraph:
        if shape not in self._graphs:
            while len(self._buffers) < len(shape.calls):
                self._buffers.append(Buffers(self._backend, self._max_pages))
            self._graphs[shape] = DecodeGraph(
                self._model, self._pool, self._backend, shape, self._buffers, self._memory
            )
        return self._graphs[shape]

    def _index(self, step: DecodeStep, size: int) -> GraphIndex | None:
        """Index arrays of a step in a graph of `size` rows; None: it does not fit."""
        page_size = self._pool.page_size
        own, shared = step.own_index(size, self._pool.num_pages, page_size), None
        if step.levels:
            shared = step.shared_index(size, max_edges(size, len(step.levels)), page_size)
            if shared is None or len(shared.kv_indices) > self._max_pages:
                return None
        return None if len(own.kv_indices) > self._max_pages else GraphIndex(own, shared)


def capture(compute: Callable[[], torch.Tensor], memory: Any, device: torch.device) -> Callable[[], torch.Tensor]:
    """Capture `compute` on `device`. The returned function replays it and always returns the same result tensor."""
    # Streams are created on the current device, which is a setting of each thread.
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Warm up: the first runs load kernels and allocate workspaces, which a capture may not do.
            compute()
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Allocations of other threads, e.g. for comparing reasoning steps, must not fail the capture.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
