"""Decode steps as CUDA graphs: one launch instead of several hundred, for a ladder of batch sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from runtime.batch import ForwardBatch
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.graph_calls import GraphCalls, is_decode, split_edges
from runtime.execution.llama import Attend, LlamaModel
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool

# Page table entries that one graph has room for: 16 MiB of them.
_MOST_PAGES = 1 << 22


class DecodeGraph:
    """A decode step of up to `size` rows with fixed buffers.

    The rows that a step has fewer compute some token into the pool's spare page.
    """

    def __init__(self, model: LlamaModel, pool: KVPool, calls: GraphCalls, memory: Any):
        """`memory`: of torch's graphs, shared among them: none runs while another does."""
        self._memory = memory
        self.size, self.calls, self.pool = calls.size, calls, pool
        device = pool.k.device
        self._model = model
        self._tokens = torch.zeros(self.size, dtype=torch.int64, device=device)
        # Positions and slots of all rows, in one transfer.
        self._places = torch.zeros(2, self.size, dtype=torch.int64, device=device)
        self._attend = Attend(pool, calls.backend, calls.calls, self._places[1], None)
        self._replay: Callable[[], torch.Tensor] | None = None

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """One step that `fits`; float32 logits [rows, vocab], which the next step overwrites."""
        (group,) = batch.groups
        self.calls.plan(group.attention)
        rows = len(batch.tokens)
        places = torch.zeros(2, self.size, dtype=torch.int64)
        places[1] = self.pool.num_pages * self.pool.page_size
        places[:, :rows] = torch.stack((batch.positions, group.kv_write))
        self._places.copy_(upload(places, self._places.device), non_blocking=True)
        # The device's already where the step before chose them and nobody has read them.
        self._tokens[:rows].copy_(upload(batch.tokens, self._tokens.device), non_blocking=True)
        if self._replay is None:
            self._replay = capture(self._compute, self._memory, self._tokens.device)
        return self._replay()[:rows]

    def _compute(self) -> torch.Tensor:
        hidden = F.embedding(self._tokens, self._model.embedding)
        layers = range(self._model.spec.num_layers)
        return self._model.logits(self._model.run_layers(layers, hidden, self._places[0], self._attend))


class DecodeGraphs:
    """The ladder; a graph is captured when it is first used."""

    def __init__(
        self, model: LlamaModel, pool: KVPool, backend: FlashInferAttention, sizes: Sequence[int], context_length: int
    ):
        self._model, self._pool, self._backend = model, pool, backend
        self.sizes = sorted(sizes)
        self._pages_of_one = -(-context_length // pool.page_size) + 1
        self._memory = torch.cuda.graph_pool_handle() if pool.k.is_cuda else None
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}

    def find(self, batch: ForwardBatch) -> DecodeGraph | None:
        """The graph that computes a step; None if it is to be computed without."""
        rows = len(batch.tokens)
        if len(batch.groups) != 1 or len(batch.logits_rows) != rows or rows > self.sizes[-1]:
            return None
        (group,) = batch.groups
        if group.rows is not None or group.load or group.save or not is_decode(group.attention):
            return None
        _, shared = split_edges(group.attention)
        graph = self._graph(self.sizes[bisect_left(self.sizes, rows)], bool(shared))
        return graph if graph.calls.fits(group.attention) else None

    def _graph(self, size: int, shared: bool) -> DecodeGraph:
        if (size, shared) not in self._graphs:
            room = min(size * self._pages_of_one, _MOST_PAGES)
            calls = GraphCalls(self._backend, size, shared, room)
            self._graphs[size, shared] = DecodeGraph(self._model, self._pool, calls, self._memory)
        return self._graphs[size, shared]


def capture(compute: Callable[[], torch.Tensor], memory: Any, device: torch.device) -> Callable[[], torch.Tensor]:
    """What runs `compute` on `device` as one graph, and returns its result, which stays in one place."""
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
        with torch.cuda.graph(graph, pool=memory):
            result = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay
