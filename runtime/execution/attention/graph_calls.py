"""FlashInfer's calls with fixed buffers, for decode steps that are replayed as a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge
from runtime.execution.attention.flashinfer import Call, Calls, FlashInferAttention
from runtime.execution.attention.paged_index import PagedIndex, first_row, merge_table, paged_index, rows_of
from runtime.execution.transfers import upload

# Levels of shared pages above a row's own that a graph has room for; deeper plans run without a graph.
_LEVELS = 2


class GraphCalls:
    """One decode call of `size` rows, and before it, with `shared`, one call over pages that rows share.

    What is missing in a step is filled up: rows and requests that read the one row of the spare page.

    Attributes:
        calls: what each layer runs; its buffers stay where they are.
    """

    def __init__(self, backend: FlashInferAttention, size: int, shared: bool, max_pages: int):
        """`max_pages`: page table entries of a step that there is room for, in all."""
        self.backend, self.size, self.shared, self.max_pages = backend, size, shared, max_pages
        # Every stretch that is shared has two rows or more, and the filling is one more request.
        self.num_requests = size if shared else 0
        # FlashInfer sizes a graph's grid for requests of one row at least, so the filling has one for each.
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
        out, lse = backend.room(total)
        table = torch.zeros(size, _LEVELS + 1, dtype=torch.int64, device=device)
        self.calls = Calls([Call(prefill, rows, None, slice(0, self.num_shared_rows)), own], table, out, lse)

    def _buffers(self, requests: int, suffix: str) -> dict[str, Any]:
        lengths = {"indptr": requests + 1, "indices": self.max_pages, "last_page_len": requests}
        device = self.backend.device
        buffers = {
            f"paged_kv_{name}_{suffix}": torch.zeros(length, dtype=torch.int32, device=device)
            for name, length in lengths.items()
        }
        return {"use_cuda_graph": True, **buffers}

    def plan(self, plan: AttentionPlan) -> None:
        """Plan the wrappers for a step that `fits`; its rows come first."""
        with self.backend.planning():
            self._plan(plan)

    def _plan(self, plan: AttentionPlan) -> None:
        page_size = self.backend.pool.page_size
        alone, shared = split_edges(plan)
        own = self._filled(paged_index(replace(plan, edges=alone), page_size), self.size, self.size)
        self.backend.plan_decode(self.calls.calls[-1].wrapper, own)
        if self.calls.table is None:
            return
        index = paged_index(replace(plan, edges=shared), page_size)
        rows = np.concatenate((index.rows, np.full(self.num_shared_rows - len(index.rows), -1)))
        index = self._filled(index, self.num_requests, self.num_shared_rows)
        call = self.calls.calls[0]
        self.backend.plan_prefill(call.wrapper, index, causal=False, mask=None)
        assert isinstance(call.rows, torch.Tensor)
        call.rows.copy_(upload(torch.from_numpy(rows.clip(0)), self.backend.device), non_blocking=True)
        # Rows of the filling go to a row behind all others, which nobody reads.
        targets = np.concatenate((np.where(rows < 0, self.size, rows), np.arange(self.size)))
        table = np.full(self.calls.table.shape, len(targets), dtype=np.int64)
        found = merge_table(targets, self.size + 1)[: self.size].numpy()
        table[:, : found.shape[1]] = found[:, : table.shape[1]]
        self.calls.table.copy_(upload(torch.from_numpy(table), self.backend.device), non_blocking=True)

    def _filled(self, index: PagedIndex, requests: int, rows: int) -> PagedIndex:
        """An index with more requests, which read the spare page: the last one has all rows that are missing."""
        more = requests - index.num_requests
        if not more:
            return index
        pages = np.full(more, self.backend.pool.num_pages, dtype=np.int32)
        given = len(index.rows)
        ends = np.minimum(given + np.arange(1, more + 1), rows)
        ends[-1] = rows
        return replace(
            index,
            rows=np.concatenate((index.rows, np.zeros(rows - given, dtype=np.int64))),
            qo_indptr=np.concatenate((index.qo_indptr, ends)).astype(np.int32),
            kv_indptr=np.concatenate((index.kv_indptr, index.kv_indptr[-1] + np.arange(1, more + 1))).astype(np.int32),
            kv_indices=np.concatenate((index.kv_indices, pages)),
            last_page_len=np.concatenate((index.last_page_len, np.ones(more, dtype=np.int32))),
        )

    def fits(self, plan: AttentionPlan) -> bool:
        """Whether there is room for a decode step."""
        _, shared = split_edges(plan)
        if bool(shared) != self.shared or plan.num_rows > self.size:
            return False
        if sum(len(span.pages) for span in plan.spans) + self.size + self.num_requests > self.max_pages:
            return False
        depth = np.zeros(plan.num_rows, dtype=np.int64)
        for edge in shared:
            depth[edge.rows] += 1
        return not shared or (len(shared) < self.num_requests and int(depth.max()) <= _LEVELS)


def split_edges(plan: AttentionPlan) -> tuple[list[Edge], list[Edge]]:
    """A decode plan's edges by first row: those of one row, which are its own, and those of several."""
    edges = sorted(plan.edges, key=lambda edge: first_row(edge, plan.num_rows))
    alone = [edge for edge in edges if len(rows_of(edge, plan.num_rows)) == 1]
    return alone, [edge for edge in edges if len(rows_of(edge, plan.num_rows)) > 1]


def is_decode(plan: AttentionPlan) -> bool:
    """Whether a plan is that of a causal decode step: one row of each request, which ends its own pages."""
    if any(edge.visible is not None for edge in plan.edges):
        return False
    if any(span.shift or span.keep is not None for span in plan.spans):
        return False
    return [first_row(edge, plan.num_rows) for edge in split_edges(plan)[0]] == list(range(plan.num_rows))
