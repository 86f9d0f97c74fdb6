"""The index arrays by which paged kernels read an attention plan, and by which their partial results are merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge, Span


@dataclass(slots=True)
class PagedIndex:
    """A batch of virtual requests, one for each edge.

    Attributes:
        rows: int64 [Q], the plan's row behind every query of the batch.
        qo_indptr: int32 [n + 1], where each virtual request's queries begin.
        kv_indptr: int32 [n + 1], where its pages begin in `kv_indices`.
        kv_indices: int32, page ids.
        last_page_len: int32 [n], rows used of its last page.
        shift: int64 [Q], how far each query is rotated back.
    """

    rows: np.ndarray
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    last_page_len: np.ndarray
    shift: np.ndarray

    @property
    def num_requests(self) -> int:
        """Virtual requests."""
        return len(self.last_page_len)

    @property
    def decode_only(self) -> bool:
        """Whether every virtual request has one query."""
        return len(self.rows) == self.num_requests


def paged_index(plan: AttentionPlan, edges: Sequence[Edge], page_size: int) -> PagedIndex:
    """Index arrays of some edges of a plan, in order."""
    rows = [rows_of(edge, plan.num_rows) for edge in edges]
    spans = [plan.spans[edge.span] for edge in edges]
    counts = [len(r) for r in rows]
    return PagedIndex(
        rows=np.concatenate(rows) if rows else np.empty(0, dtype=np.int64),
        qo_indptr=_indptr(counts),
        kv_indptr=_indptr([len(span.pages) for span in spans]),
        kv_indices=np.concatenate([span.pages for span in spans]) if spans else np.empty(0, dtype=np.int32),
        last_page_len=np.array([(span.length - 1) % page_size + 1 for span in spans], dtype=np.int32),
        shift=np.repeat(np.array([span.shift for span in spans], dtype=np.int64), counts),
    )


def rows_of(edge: Edge, num_rows: int) -> np.ndarray:
    """An edge's rows as int64."""
    if isinstance(edge.rows, slice):
        return np.arange(*edge.rows.indices(num_rows), dtype=np.int64)
    return edge.rows.cpu().numpy()


def flat_mask(edge: Edge, span: Span, num_rows: int) -> torch.Tensor:
    """An edge's visible pairs as a flat bool tensor [rows * span.length]."""
    if edge.mode == "masked":
        assert edge.mask is not None
        visible = edge.mask.clone()
    else:
        visible = torch.ones(num_rows, span.length, dtype=torch.bool)
        if edge.mode == "causal":
            visible = visible.tril(span.length - num_rows)
    if span.keep is not None:
        visible &= span.keep
    return visible.flatten()


def merge_table(rows: np.ndarray, num_rows: int) -> torch.Tensor:
    """Which partial results belong to each row.

    Args:
        rows: int64 [E], the row of each partial result.
        num_rows: rows of the result.

    Returns:
        int64 [num_rows, n], for the most results n that a row has, in their order; E where a row has fewer.
    """
    counts = np.bincount(rows, minlength=num_rows)
    order = np.argsort(rows, kind="stable")
    first = np.cumsum(counts) - counts
    table = np.full((num_rows, int(counts.max(initial=1))), len(rows), dtype=np.int64)
    table[rows[order], np.arange(len(rows)) - first[rows[order]]] = order
    return torch.from_numpy(table)


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
