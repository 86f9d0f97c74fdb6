"""Attention of a CUDA graph: FlashInfer's calls with fixed buffers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from runtime.execution.attention.flashinfer import Call, FlashInferAttention, GroupCalls
from runtime.execution.attention.graph_step import GraphStep
from runtime.execution.attention.paged_index import PagedIndex
from runtime.execution.transfers import upload

# FlashInfer's plan of a call in a graph takes less.
_PLAN_BYTES = 1 << 20

# Most virtual requests for what rows share.
MAX_EDGES = 32


class RowShape(NamedTuple):
    """Number of rows of a graph, and most requests that they belong to; as many as rows: one row of each request."""

    size: int
    requests: int

    @property
    def decodes(self) -> bool:
        return self.requests == self.size


class CallShape(NamedTuple):
    """What the attention of a layer group in a graph cannot change: levels, and window, of its `GraphStep`s."""

    levels: int
    window: int | None = None


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

    @property
    def most_pages(self) -> int:
        """Page table entries of the call that has the most."""
        return max(len(one.kv_indices) for one in (self.own, self.shared) if one is not None)


class GraphAttention:
    """The attention of a layer group in a graph, with fixed buffers.

    One call reads what each request reads alone: a decode call if each has one row, otherwise a causal prefill call.
    Another prefill call reads what rows share, with all rows as queries on each level, and a number of virtual requests
    that depends on the shape only. Then each level is merged in place.

    What a captured call keeps are numbers of its first plan, which do not depend on lengths: the number of virtual
    requests and of queries, and the tiles and grid that follow from them. FlashInfer splits keys over the grid in
    arrays that each plan copies to the device.

    Attributes:
        calls: the calls, which every layer uses; their buffers keep their addresses.
    """

    def __init__(self, backend: FlashInferAttention, rows: RowShape, shape: CallShape, buffers: Buffers):
        self._backend, self._rows, self._shape, self._buffers = backend, rows, shape, buffers
        size = rows.size
        self._own = self._make_decode(size) if rows.decodes else self._make_prefill("own", size, rows.requests)
        own = Call(self._own, None, None)
        self._shared: Any = None
        if not shape.levels:
            self.calls = GroupCalls([own])
            return
        queries = size * shape.levels
        self._shared = self._make_prefill("shared", queries, max_edges(size, shape.levels))
        several = None if shape.levels == 1 else upload(torch.arange(size).repeat(shape.levels), backend.device)
        results = backend.results(size + queries)
        own.into = results.of(slice(0, size))
        shared = Call(self._shared, several, None, results.of(slice(size, None)))
        levels = (slice(first, first + size) for first in range(size, size + queries, size))
        self.calls = backend.merged([own, shared], 0, results, [(slice(0, size), level) for level in levels])

    def _make_decode(self, size: int) -> Any:
        return self._make(self._backend.make_decode, "buffer", "own", size, size)

    def _make_prefill(self, kind: str, queries: int, requests: int) -> Any:
        qo_indptr = _zeros(self._backend, requests + 1, torch.int32)
        return self._make(self._backend.make_prefill, "buf", kind, queries, requests, qo_indptr_buf=qo_indptr)

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
        if self._rows.decodes:
            self._backend.plan_decode(self._own, index.own, self._shape.window)
        else:
            self._backend.plan_prefill(self._own, index.own, causal=True, window=self._shape.window)
        if index.shared is not None:
            self._backend.plan_prefill(self._shared, index.shared)


def graph_index(step: GraphStep, rows: RowShape, spare: int, page_size: int) -> GraphIndex | None:
    """Index arrays of a step in a graph; None: it has too many virtual requests. `spare`: page of unused rows."""
    own, shared = step.own_index(*rows, spare, page_size), None
    if step.levels:
        shared = step.shared_index(rows.size, max_edges(rows.size, len(step.levels)), page_size)
        if shared is None:
            return None
    return None if own is None else GraphIndex(own, shared)


def max_edges(size: int, levels: int) -> int:
    """Virtual requests of the call for what `size` rows share.

    FlashInfer cuts tiles for the longest request that leaves a query for each other one. So half as many requests as
    queries still get large tiles.
    """
    queries = size * levels
    return min(max(queries // 2, 4), queries, MAX_EDGES)


def _zeros(backend: FlashInferAttention, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(length, dtype=dtype, device=backend.device)
