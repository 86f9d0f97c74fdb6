"""FlashInfer's calls with fixed buffers, for decode steps that are replayed as a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge
from runtime.execution.attention.flashinfer import Call, Calls, FlashInferAttention
from runtime.execution.attention.paged_index import PagedIndex, by_call, first_row, merge_table, paged_index, rows_of
from runtime.execution.transfers import upload

# Spans of each row, besides its own, that a graph has room for; plans with more run without a graph.
_LEVELS = 2


@dataclass(slots=True)
class DecodePlan:
    """A decode step's attention plan, split into the two calls of a graph.

    Attributes:
        own: one edge for each row, in order: the longest unshifted span that only this row reads.
        shared: all other edges, by first row.
    """

    own: AttentionPlan
    shared: AttentionPlan

    @property
    def is_shifted(self) -> bool:
        """Whether some queries are rotated by a shift."""
        return any(span.shift for span in self.shared.spans)

    def fits(self, size: int, max_pages: int) -> bool:
        """Whether a graph of `size` rows and `max_pages` page table entries a call has room for it."""
        depth = np.zeros(self.own.num_rows, dtype=np.int64)
        for edge in self.shared.edges:
            depth[rows_of(edge, len(depth))] += 1
        if len(depth) > size or len(self.shared.edges) > size or int(depth.max(initial=0)) > _LEVELS:
            return False
        return all(sum(len(span.pages) for span in p.spans) + size + 1 <= max_pages for p in (self.own, self.shared))


def decode_plan(plan: AttentionPlan, page_size: int) -> DecodePlan | None:
    """Split the plan of a decode step; None for plans that no graph computes.

    No graph computes spans with `keep`, rows that see different prefixes of a span, and rows without an unshifted
    span that they alone read.
    """
    calls = by_call(plan, page_size)
    single, several = (calls.get(call, AttentionPlan(plan.num_rows)) for call in ("causal", "full"))
    if "masked" in calls or any(len(rows_of(edge, plan.num_rows)) > 1 for edge in single.edges):
        return None
    own: dict[int, Edge] = {}
    for edge in single.edges:
        row, span = first_row(edge, plan.num_rows), single.spans[edge.span]
        if not span.shift and (row not in own or span.length > single.spans[own[row].span].length):
            own[row] = edge
    if len(own) < plan.num_rows:
        return None
    alone, shared = AttentionPlan(plan.num_rows), AttentionPlan(plan.num_rows)
    for edge in single.edges:
        is_own = own[first_row(edge, plan.num_rows)] is edge
        (alone if is_own else shared).add(edge.rows, single.spans[edge.span])
    for edge in several.edges:
        shared.add(edge.rows, several.spans[edge.span])
    shared.edges.sort(key=lambda edge: first_row(edge, plan.num_rows))
    return DecodePlan(alone, shared)


class GraphCalls:
    """A decode call of `size` rows and, with `shared`, a prefill call before it over the other spans.

    Missing rows and requests are filled up with some that read one row of the spare page.

    Attributes:
        calls: calls of each layer; their buffers keep their addresses.
    """

    def __init__(self, backend: FlashInferAttention, size: int, shared: bool, shifted: bool, max_pages: int):
        """`shifted`: the prefill call rotates its queries. `max_pages`: page table entries of each call."""
        self.backend, self.size, self.max_pages = backend, size, max_pages
        # The filling is at least one request.
        self.num_requests = size + 1 if shared else 0
        # FlashInfer sizes a graph's grid for requests of at least one row, so the filling has one for each.
        self.num_shared_rows = _LEVELS * size + self.num_requests if shared else 0
        device = backend.device
        total = self.num_shared_rows + size
        backend.reserve(size, size)
        backend.reserve(self.num_requests, self.num_shared_rows)
        decode = backend.make_decode(**self._buffers(size, "buffer"))
        own = Call(decode, slice(0, size), None, slice(self.num_shared_rows, total))
        if not shared:
            self.calls = Calls([own])
            return
        prefill = backend.make_prefill(
            qo_indptr_buf=torch.zeros(self.num_requests + 1, dtype=torch.int32, device=device),
            **self._buffers(self.num_requests, "buf"),
        )
        rows = torch.zeros(self.num_shared_rows, dtype=torch.int64, device=device)
        cos_sin = backend.rope.shift(rows) if shifted else None
        table = torch.zeros(size, _LEVELS + 1, dtype=torch.int64, device=device)
        first = Call(prefill, rows, cos_sin, slice(0, self.num_shared_rows))
        self.calls = Calls([first, own], table, *backend.room(total))

    def _buffers(self, requests: int, suffix: str) -> dict[str, Any]:
        lengths = {"indptr": requests + 1, "indices": self.max_pages, "last_page_len": requests}
        device = self.backend.device
        buffers = {
            f"paged_kv_{name}_{suffix}": torch.zeros(length, dtype=torch.int32, device=device)
            for name, length in lengths.items()
        }
        return {"use_cuda_graph": True, **buffers}

    def plan(self, plan: DecodePlan) -> None:
        """Plan the wrappers for a step that `fits`, within the backend's `planning`; its rows come first."""
        page_size = self.backend.pool.page_size
        own = self._filled(paged_index(plan.own, page_size), self.size, self.size)
        self.backend.plan_decode(self.calls.calls[-1].wrapper, own)
        if self.calls.table is None:
            return
        index = paged_index(plan.shared, page_size)
        rows = np.concatenate((index.rows, np.full(self.num_shared_rows - len(index.rows), -1)))
        index = self._filled(index, self.num_requests, self.num_shared_rows)
        call = self.calls.calls[0]
        self.backend.plan_prefill(call.wrapper, index, causal=False, mask=None)
        assert isinstance(call.rows, torch.Tensor)
        self._copy(call.rows, rows.clip(0))
        if call.cos_sin is not None:
            shifts = upload(torch.from_numpy(-index.shift), self.backend.device)
            for buffer, values in zip(call.cos_sin, self.backend.rope.shift(shifts), strict=True):
                buffer.copy_(values)
        # Results of the filling belong to a row behind all others, which is not read.
        targets = np.concatenate((np.where(rows < 0, self.size, rows), np.arange(self.size)))
        table = np.full(self.calls.table.shape, len(targets), dtype=np.int64)
        found = merge_table(targets, self.size + 1)[: self.size].numpy()
        table[:, : found.shape[1]] = found[:, : table.shape[1]]
        self._copy(self.calls.table, table)

    def _copy(self, buffer: torch.Tensor, values: np.ndarray) -> None:
        buffer.copy_(upload(torch.from_numpy(values), self.backend.device), non_blocking=True)

    def _filled(self, index: PagedIndex, requests: int, rows: int) -> PagedIndex:
        """An index with requests of the spare page added; the last one has all remaining rows."""
        more = requests - index.num_requests
        if not more:
            return index
        pages = np.full(more, self.backend.pool.num_pages, dtype=np.int32)
        given = len(index.rows)
        ends = np.minimum(given + np.arange(1, more + 1), rows)
        ends[-1] = rows
        missing = np.zeros(rows - given, dtype=np.int64)
        return replace(
            index,
            rows=np.concatenate((index.rows, missing)),
            qo_indptr=np.concatenate((index.qo_indptr, ends)).astype(np.int32),
            kv_indptr=np.concatenate((index.kv_indptr, index.kv_indptr[-1] + np.arange(1, more + 1))).astype(np.int32),
            kv_indices=np.concatenate((index.kv_indices, pages)),
            last_page_len=np.concatenate((index.last_page_len, np.ones(more, dtype=np.int32))),
            shift=np.concatenate((index.shift, missing)),
        )
