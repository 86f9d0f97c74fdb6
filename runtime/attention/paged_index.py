"""The index arrays by which paged kernels read an attention plan, and the merge of their partial results."""

from __future__ import annotations

import math
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


def merge_segments(out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Merge partial results that belong to the same rows, exactly.

    Args:
        out: [E, heads, dim].
        lse: [E, heads], base 2.
        rows: int64 [E], the row of each partial result.
        num_rows: rows of the result.

    Returns:
        [num_rows, heads, dim] in out's dtype; zeros for rows that see nothing.
    """
    top = torch.full((num_rows, lse.shape[1]), -math.inf, device=lse.device)
    top.scatter_reduce_(0, rows[:, None].expand(lse.shape), lse.float(), "amax")
    top.masked_fill_(torch.isneginf(top), 0.0)
    weight = torch.exp2(lse.float() - top[rows])
    total = torch.zeros_like(top).index_add_(0, rows, weight)
    # A partial result that saw nothing has weight 0, and may hold anything.
    wide = torch.where(weight[..., None] > 0, out.float() * weight[..., None], 0.0)
    merged = torch.zeros(num_rows, *out.shape[1:], device=out.device).index_add_(0, rows, wide)
    return (merged / total.clamp_min(1e-38)[..., None]).to(out.dtype)


def _indptr(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
