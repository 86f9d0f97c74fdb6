"""Decode steps as CUDA graphs, one for each batch size: one launch instead of several hundred."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from runtime.batch import AttentionPlan, ForwardBatch
from runtime.execution.attention.flashinfer import Call, FlashInferAttention, GroupCalls
from runtime.execution.attention.paged_index import PagedIndex, by_call, paged_index
from runtime.execution.llama import LlamaModel
from runtime.execution.mixers.mixer import Attend
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool

# Most page table entries of a call in a graph; they take 16 MiB.
_MAX_PAGES = 1 << 22


class GraphCall:
    """A decode call of `size` rows with fixed buffers. Unused rows read one row of the spare page.

    Attributes:
        calls: the call, which every layer uses; its buffers keep their addresses.
    """

    def __init__(self, backend: FlashInferAttention, size: int, max_pages: int):
        """`max_pages`: most page table entries of the call."""
        self._backend, self._size = backend, size
        backend.reserve(size)
        lengths = {"indptr": size + 1, "indices": max_pages, "last_page_len": size}
        buffers = {
            f"paged_kv_{name}_buffer": torch.zeros(length, dtype=torch.int32, device=backend.device)
            for name, length in lengths.items()
        }
        self._wrapper = backend.make_decode(use_cuda_graph=True, **buffers)
        self.calls = GroupCalls([Call(self._wrapper, slice(0, size), None, slice(0, size))])

    def plan(self, plan: AttentionPlan) -> None:
        """Plan the wrapper for a result of `decode_plan`; call within the backend's `planning`."""
        index = paged_index(plan, self._backend.pool.page_size)
        self._backend.plan_decode(self._wrapper, self._pad(index))

    def _pad(self, index: PagedIndex) -> PagedIndex:
        missing = self._size - index.num_requests
        spare = np.full(missing, self._backend.pool.num_pages, dtype=np.int32)
        return replace(
            index,
            kv_indptr=np.concatenate((index.kv_indptr, index.kv_indptr[-1] + np.arange(1, missing + 1))).astype(
                np.int32
            ),
            kv_indices=np.concatenate((index.kv_indices, spare)),
            last_page_len=np.concatenate((index.last_page_len, np.ones(missing, dtype=np.int32))),
        )


def decode_plan(plan: AttentionPlan, page_size: int) -> AttentionPlan | None:
    """The plan with one edge per row, in order; None if rows share spans, or read several spans or shifted ones."""
    calls = by_call(plan, page_size)
    single = calls.get("causal")
    if single is None or len(calls) > 1 or len(single.edges) != plan.num_rows:
        return None
    rows = paged_index(single, page_size).rows
    if not np.array_equal(rows, np.arange(plan.num_rows)) or any(span.shift for span in single.spans):
        return None
    return single


class DecodeGraph:
    """A decode step of up to `size` rows with fixed buffers.

    Unused rows compute an arbitrary token and write its KV to the pool's spare page.
    """

    def __init__(
        self,
        model: LlamaModel,
        pool: KVPool,
        backend: FlashInferAttention,
        size: int,
        max_pages: int,
        memory: Any,
    ):
        """`max_pages`: see `GraphCall`. `memory`: pool that all graphs share, since only one runs at a time."""
        self._memory = memory
        self._model, self._pool, self._backend = model, pool, backend
        device = pool.k.device
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        # Positions and slots, in one transfer.
        self._places = torch.zeros(2, size, dtype=torch.int64, device=device)
        self._call = GraphCall(backend, size, max_pages)
        self._attend = Attend(pool, backend, self._call.calls, self._places[1], None)
        self._replay: Callable[[], torch.Tensor] | None = None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, plan: AttentionPlan) -> torch.Tensor:
        """Run a step of at most `size` rows. The next step overwrites the float32 logits [rows, vocab]."""
        with self._backend.planning():
            self._call.plan(plan)
        rows, spare = len(batch.tokens), self._pool.num_pages * self._pool.page_size
        places = torch.full(self._places.shape, spare)
        places[0] = 0
        places[0, :rows] = batch.positions
        slots = batch.groups[0].kv_write
        places[1, :rows] = slots.where(slots >= 0, spare)
        self._places.copy_(upload(places, self._places.device), non_blocking=True)
        # With overlapping steps, the tokens are already on the device.
        self._tokens[:rows].copy_(upload(batch.tokens, self._tokens.device), non_blocking=True)
        if self._replay is None:
            self._replay = capture(self._compute, self._memory, self._tokens.device)
        return self._replay()[:rows]

    def _compute(self) -> torch.Tensor:
        hidden = F.embedding(self._tokens, self._model.embedding)
        layers = range(self._model.spec.num_layers)
        return self._model.logits(self._model.run_layers(layers, hidden, self._places[0], self._attend))


class DecodeGraphs:
    """Decode graphs for several batch sizes. Each is captured when it is first used.

    A step runs without a graph if
    - it has several layer groups, or loads or saves hidden states;
    - it does not need the logits of all rows in order;
    - it has more rows than the largest size, or more page table entries than a graph;
    - rows share pages or read several spans (`decode_plan`).
    """

    def __init__(
        self, model: LlamaModel, pool: KVPool, backend: FlashInferAttention, sizes: Sequence[int], context_length: int
    ):
        self._model, self._pool, self._backend = model, pool, backend
        self.sizes = sorted(sizes)
        self._pages_of_one = -(-context_length // pool.page_size) + 1
        self._memory = torch.cuda.graph_pool_handle() if pool.k.is_cuda else None
        self._graphs: dict[int, DecodeGraph] = {}

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run the smallest graph that fits, see `DecodeGraph.run`; None: the step must run without a graph."""
        rows = len(batch.tokens)
        if rows > self.sizes[-1] or not torch.equal(batch.logits_rows, torch.arange(rows)):
            return None
        group = batch.groups[0]
        if len(batch.groups) > 1 or group.rows is not None or group.load or group.save:
            return None
        plan = decode_plan(group.attention, self._pool.page_size)
        if plan is None:
            return None
        size = self.sizes[bisect_left(self.sizes, rows)]
        max_pages = min(size * self._pages_of_one, _MAX_PAGES)
        if sum(len(span.pages) for span in plan.spans) + size > max_pages:
            return None
        if size not in self._graphs:
            self._graphs[size] = DecodeGraph(self._model, self._pool, self._backend, size, max_pages, self._memory)
        return self._graphs[size].run(batch, plan)


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
