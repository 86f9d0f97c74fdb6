"""Small steps as CUDA graphs: one launch instead of several hundred."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.batch import ForwardBatch
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.graph_calls import (
    MAX_EDGES,
    Buffers,
    CallShape,
    GraphAttention,
    GraphIndex,
    RowShape,
    graph_index,
)
from runtime.execution.attention.graph_step import GraphStep, graph_step
from runtime.execution.attention.windows import windowed
from runtime.execution.device import is_lost
from runtime.execution.mixers.mixer import Attend
from runtime.execution.torch_decoder import TorchDecoder
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool

log = logging.getLogger("ramet.engine")

# Rows of the graphs for steps with prompt rows. A step with more rows computes for about as long as its launches take
# the host, or longer. Up to 128 rows, a GPU reads weights for longer than it computes, so unused rows cost nothing;
# beyond, there are at most 128 of them.
PROMPT_SIZES = (64, 128, 256, 384, 512)

# Most requests of such a graph, and most rows whose logits it computes.
_MAX_REQUESTS, _MAX_LOGITS = 64, 64

# Most page table entries of a call in a graph; they take 16 MiB.
_MAX_PAGES = 1 << 22

# Most levels of shared spans in a graph.
_MAX_LEVELS = 3


class GraphShape(NamedTuple):
    """What a graph cannot change.

    Attributes:
        rows: number of rows and of requests.
        calls: the attention plans.
        groups: the layers of each layer group, and the index of its plan.
    """

    rows: RowShape
    calls: tuple[CallShape, ...]
    groups: tuple[tuple[range, int], ...]


def prompt_rows(size: int) -> RowShape:
    """The shape for any rows. Half as many requests as rows still get FlashInfer's large tiles, see `max_edges`."""
    return RowShape(size, min(size // 2, _MAX_REQUESTS))


class StepGraph:
    """A step of up to `shape.rows.size` rows with fixed buffers.

    Unused rows compute an arbitrary token and write its KV to the pool's spare page.
    """

    def __init__(
        self,
        model: TorchDecoder,
        pool: KVPool,
        backend: FlashInferAttention,
        shape: GraphShape,
        buffers: Sequence[Buffers],
        memory: Any,
    ):
        """`buffers`: one for each plan. `memory`: pool that all graphs share, since only one runs at a time."""
        self._memory = memory
        self._model, self._pool, self._backend, self._groups = model, pool, backend, shape.groups
        device, size = pool.k.device, shape.rows.size
        self._size, self._decodes = size, shape.rows.decodes
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        # Positions, slots, and rows whose logits are wanted, in one transfer.
        wanted = 0 if self._decodes else min(size, _MAX_LOGITS)
        self._numbers = torch.zeros(2 * size + wanted, dtype=torch.int64, device=device)
        self._positions, self._slots, self._wanted = self._numbers.split([size, size, wanted])
        calls = zip(shape.calls, buffers, strict=False)
        self._calls = [GraphAttention(backend, shape.rows, one, buffer) for one, buffer in calls]
        self._attends = [Attend(pool, backend, one.calls, self._slots, None) for one in self._calls]
        self._replay: Callable[[], torch.Tensor] | None = None

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @torch.inference_mode()
    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        plans: Sequence[GraphIndex],
    ) -> torch.Tensor:
        """Run a step of n rows, at most `size`. The next step overwrites the float32 logits [S, vocab].

        Args:
            tokens: int64 [n], on the host or the device.
            positions, slots: int64 [n]; a negative slot is not written.
            wanted: int64 [S], the rows whose logits are computed, at most `_MAX_LOGITS`; of a decode step, all rows.
            plans: of each of the shape's plans.
        """
        with self._backend.planning():
            for calls, index in zip(self._calls, plans, strict=True):
                calls.plan(index)
        rows, size, page_size = len(tokens), self._size, self._pool.page_size
        spare = self._pool.num_pages * page_size
        numbers = torch.zeros(len(self._numbers), dtype=torch.int64)
        numbers[:rows] = positions
        numbers[size : size + rows] = slots.where(slots >= 0, spare)
        numbers[size + rows : 2 * size] = spare + torch.arange(size - rows) % page_size
        if not self._decodes:
            numbers[2 * size : 2 * size + len(wanted)] = wanted
        self._numbers.copy_(upload(numbers, self._numbers.device), non_blocking=True)
        # With overlapping steps, the tokens are already on the device.
        self._tokens[:rows].copy_(upload(tokens, self._tokens.device), non_blocking=True)
        if self._replay is None:
            self._replay = capture(self._compute, self._memory, self._tokens.device)
        return self._replay()[: len(wanted)]

    def _compute(self) -> torch.Tensor:
        hidden = F.embedding(self._tokens, self._model.embedding)
        for layers, plan in self._groups:
            hidden = self._model.run_layers(layers, hidden, self._positions, self._attends[plan])
        return self._model.logits(hidden if self._decodes else hidden[self._wanted])


class StepGraphs:
    """Graphs for several numbers of rows, and for what rows share. Each is captured when it is first used.

    There are two kinds: for decode steps, with a row of each request, and for steps in which requests have any number
    of rows: parts of prompts, and drafts that are verified. A step runs without a graph if
    - its layer groups compute different rows, or load or save hidden states;
    - it has more rows, more requests with several rows, more wanted logits or more page table entries than any graph;
    - rows share spans on more levels, or more of them, than a graph has (`_MAX_LEVELS`, `max_edges`);
    - rows read shifted or thinned spans, or several alone (`graph_step`);
    - its graph could not be captured before.
    """

    def __init__(
        self,
        model: TorchDecoder,
        pool: KVPool,
        backend: FlashInferAttention,
        sizes: Sequence[int],
        prompt_sizes: Sequence[int],
        context_length: int,
    ):
        """`sizes`, `prompt_sizes`: numbers of rows of decode steps, at least one, and of other steps."""
        self._model, self._pool, self._backend = model, pool, backend
        self.sizes, self.prompt_sizes = sorted(sizes), sorted(prompt_sizes)
        pages_of_one = -(-context_length // pool.page_size) + 1
        of_prompts = [prompt_rows(size).requests for size in self.prompt_sizes]
        requests = max(self.sizes[-1], MAX_EDGES, *of_prompts)
        self._max_pages = min(requests * pages_of_one, _MAX_PAGES)
        self._memory = torch.cuda.graph_pool_handle() if pool.k.is_cuda else None
        self._buffers: list[Buffers] = []
        self._graphs: dict[GraphShape, StepGraph] = {}
        self._refused: set[GraphShape] = set()

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run the smallest graph that fits, see `StepGraph.run`; None: the step must run without a graph."""
        first = batch.groups[0]
        for group in batch.groups:
            if group.rows is not None or group.load or group.save or group.kv_write is not first.kv_write:
                return None
        shapes = self._row_shapes(batch)
        plans = {id(group.attention): group.attention for group in batch.groups}
        order, steps = [*plans], list[GraphStep]()
        for plan in plans.values() if shapes else ():
            step = graph_step(*windowed(plan, self._pool.page_size))
            if step is None or len(step.levels) > _MAX_LEVELS:
                return None
            steps.append(step)
        calls = tuple(CallShape(len(step.levels), step.window) for step in steps)
        groups = tuple((group.layers, order.index(id(group.attention))) for group in batch.groups)
        for rows in shapes:
            indexes = self._indexes(steps, rows)
            if indexes is not None:
                return self._run(GraphShape(rows, calls, groups), batch, indexes)
        return None

    def _row_shapes(self, batch: ForwardBatch) -> list[RowShape]:
        """The rows of graphs that a step may fit into, the best first."""
        rows, wanted = len(batch.tokens), batch.logits_rows
        found: list[RowShape] = []
        if rows <= self.sizes[-1] and torch.equal(wanted, torch.arange(rows)):
            size = self.sizes[bisect_left(self.sizes, rows)]
            found.append(RowShape(size, size))
        if len(wanted) <= _MAX_LOGITS:
            found += [prompt_rows(size) for size in self.prompt_sizes if size >= max(rows, len(wanted))]
        return found

    def _run(self, shape: GraphShape, batch: ForwardBatch, indexes: Sequence[GraphIndex]) -> torch.Tensor | None:
        if shape in self._refused:
            return None
        try:
            writes = batch.groups[0].kv_write
            return self._graph(shape).run(batch.tokens, batch.positions, writes, batch.logits_rows, indexes)
        except Exception as error:  # of the driver, the allocator or a kernel
            if (shape in self._graphs and self._graphs[shape].is_captured) or is_lost(self._pool.k.device):
                raise
            # The step's KV is written again without a graph. Other requests would fail with this shape too.
            kind, size = "decode" if shape.rows.decodes else "prompt", shape.rows.size
            log.warning("%s steps of %d rows run without a CUDA graph, which cannot be captured: %s", kind, size, error)
            self._refused.add(shape)
            self._graphs.pop(shape, None)
            return None

    def shapes(self, most: int) -> list[GraphShape]:
        """The graphs that steps of up to `most` requests usually need, the largest first: others reuse its memory.

        Rows share nothing, or one level of spans.
        """
        rows = [RowShape(size, size) for size in self.sizes[: bisect_left(self.sizes, most) + 1]]
        rows += [prompt_rows(size) for size in self.prompt_sizes]
        layers = range(self._model.spec.num_layers)
        return [
            GraphShape(one, (CallShape(levels),), ((layers, 0),))
            for one in sorted(rows, reverse=True)
            for levels in ((1, 0) if min(one.requests, most) > 1 else (0,))
        ]

    def capture(self, shape: GraphShape) -> None:
        """Capture a graph before a step needs it. It computes unused rows only."""
        indexes = self._indexes([GraphStep((), [()] * call.levels, call.window) for call in shape.calls], shape.rows)
        nothing = torch.empty(0, dtype=torch.int64)
        if indexes is not None:
            self._graph(shape).run(nothing, nothing, nothing, nothing, indexes)

    def _graph(self, shape: GraphShape) -> StepGraph:
        if shape not in self._graphs:
            while len(self._buffers) < len(shape.calls):
                self._buffers.append(Buffers(self._backend, self._max_pages))
            self._graphs[shape] = StepGraph(self._model, self._pool, self._backend, shape, self._buffers, self._memory)
        return self._graphs[shape]

    def _indexes(self, steps: Sequence[GraphStep], rows: RowShape) -> list[GraphIndex] | None:
        """Index arrays of a step's plans in a graph; None: it does not fit."""
        if rows.decodes and not all(step.decodes for step in steps):
            return None
        spare, page_size = self._pool.num_pages, self._pool.page_size
        found = [graph_index(step, rows, spare, page_size) for step in steps]
        fitting = [index for index in found if index is not None and index.most_pages <= self._max_pages]
        return fitting if len(fitting) == len(found) else None


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
        # Allocations of other threads must not fail the capture.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
