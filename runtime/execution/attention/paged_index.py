"""Index arrays for paged kernels: how they read an attention plan, and how to merge their partial results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge, Span, rows_of

# A table of partial results costs three kernels a layer, in place of one for each run of rows.
_MOST_RUNS = 3


@dataclass(slots=True)
class PagedIndex:
    """A batch of virtual requests, one for each edge.

    Attributes:
        rows: int64 [Q], the plan's row of each query of the batch.
        qo_indptr: int32 [n + 1], the first query of each of n virtual requests.
        kv_indptr: int32 [n + 1], the first page of each request in `kv_indices`.
        kv_indices: int32, page ids.
        last_page_len: int32 [n], used rows of each request's last page.
        shift: int64 [Q], the shift of the span that each query reads.
    """

    rows: np.ndarray
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    last_page_len: np.ndarray
    shift: np.ndarray

    @property
    def num_requests(self) -> int:
        return len(self.last_page_len)

    def lengths(self, page_size: int) -> np.ndarray:
        """Keys that each virtual request reads, int32 [n]."""
        return (np.diff(self.kv_indptr).clip(1) - 1) * page_size + self.last_page_len

    @property
    def decode_only(self) -> bool:
        """Whether every virtual request has one query."""
        return len(self.rows) == self.num_requests


def paged_index(plan: AttentionPlan, page_size: int) -> PagedIndex:
    """Index arrays for the edges of a plan, in order. They ignore `visible`, `hidden` and `keep`."""
    rows = [rows_of(edge, plan.num_rows) for edge in plan.edges]
    spans = [plan.spans[edge.span] for edge in plan.edges]
    counts = [len(r) for r in rows]
    return PagedIndex(
        rows=np.concatenate(rows) if rows else np.empty(0, dtype=np.int64),
        qo_indptr=indptr(counts),
        kv_indptr=indptr([len(span.pages) for span in spans]),
        kv_indices=np.concatenate([span.pages for span in spans]) if spans else np.empty(0, dtype=np.int32),
        last_page_len=np.array([(span.length - 1) % page_size + 1 for span in spans], dtype=np.int32),
        shift=np.repeat(np.array([span.shift for span in spans], dtype=np.int64), counts),
    )


def first_row(edge: Edge, num_rows: int) -> int:
    """An edge's first row. Sorting edges by it keeps the results of a call in the order of the rows."""
    return edge.rows.indices(num_rows)[0] if isinstance(edge.rows, slice) else int(edge.rows[0])


def visible_of(edge: Edge, plan: AttentionPlan) -> np.ndarray:
    """`Edge.visible`, int32 [n]; if it is None, the length of the span for every row."""
    if edge.visible is not None:
        return edge.visible
    return np.full(len(rows_of(edge, plan.num_rows)), plan.spans[edge.span].length, dtype=np.int32)


def is_causal(visible: np.ndarray) -> bool:
    """Whether each row sees one row of the span more than the row before it."""
    return bool(visible[0] > 0 and (np.diff(visible) == 1).all())


def causal_window(plan: AttentionPlan) -> int | None:
    """How many of the last rows that they would see the rows of causal edges see; None: all, or edges differ."""
    if all(edge.hidden is None for edge in plan.edges):
        return None
    sizes: set[int] = set()
    most = 0  # that a row sees of which nothing is hidden
    for edge in plan.edges:
        visible = visible_of(edge, plan)
        if plan.spans[edge.span].keep is not None or not is_causal(visible):
            continue
        hidden = np.zeros_like(visible) if edge.hidden is None else edge.hidden
        sizes.update((visible - hidden)[hidden > 0].tolist())
        most = max(most, int(visible[hidden == 0].max(initial=0)))
    return sizes.pop() if len(sizes) == 1 and most <= min(sizes) else None


def visible_pairs(edge: Edge, plan: AttentionPlan) -> torch.Tensor:
    """The mask of an edge, bool [rows, length of the span], from `hidden`, `visible` and `keep`."""
    span = plan.spans[edge.span]
    rows = torch.arange(span.length)
    seen = rows < torch.from_numpy(visible_of(edge, plan))[:, None]
    if edge.hidden is not None:
        seen &= rows >= torch.from_numpy(edge.hidden)[:, None]
    return seen if span.keep is None else seen & span.keep


def by_call(plan: AttentionPlan, page_size: int, window: int | None = None) -> dict[str, AttentionPlan]:
    """Split a plan into the plans of up to three batched calls, whose edges are sorted by their first rows.

    - `full`: all rows of an edge see its whole span.
    - `causal`: row i of n sees the span without its last n - 1 - i rows; single rows belong here. With `window`, the
      result of `causal_window`, it sees the last `window` rows of these.
    - `masked`: all other edges. The whole pages that all rows of such an edge see become a `full` edge.
    """
    found: dict[str, AttentionPlan] = {}
    for edge in sorted(plan.edges, key=lambda edge: first_row(edge, plan.num_rows)):
        for call, span, visible in _cut(edge, plan, page_size, window is not None):
            found.setdefault(call, AttentionPlan(plan.num_rows)).add(edge.rows, span, visible, edge.hidden)
    return {call: found[call] for call in ("full", "causal", "masked") if call in found}


def _cut(
    edge: Edge, plan: AttentionPlan, page_size: int, has_window: bool
) -> Iterator[tuple[str, Span, np.ndarray | None]]:
    """Split an edge into parts: (name of the call, part of the span, `Edge.visible` for this part)."""
    span = plan.spans[edge.span]
    if edge.visible is None and edge.hidden is None and span.keep is None:
        yield "causal" if len(rows_of(edge, plan.num_rows)) == 1 else "full", span, None
        return
    visible = visible_of(edge, plan)
    least, most = int(visible.min()), int(visible.max())

    def part(start: int, stop: int) -> Span:
        pages = span.pages[start // page_size : -(-stop // page_size)]
        return replace(span, pages=pages, length=stop - start, keep=None if span.keep is None else span.keep[:stop])

    if not most:
        return
    if span.keep is not None or (edge.hidden is not None and not (has_window and is_causal(visible))):
        yield "masked", part(0, most), visible
    elif is_causal(visible):
        yield "causal", part(0, most), visible
    elif least == most:
        yield "full", part(0, most), None
    else:
        whole = least // page_size * page_size
        if whole:
            yield "full", part(0, whole), None
        yield "masked", part(whole, most), visible - whole


def merge_runs(rows: Sequence[np.ndarray], whole: int) -> list[tuple[slice, slice]] | None:
    """Which partial results to merge into those of call `whole`, which has all rows in order.

    Args:
        rows: int64, the row of each partial result, for each call.
        whole: index into `rows`.

    Returns:
        (partial results of `whole`, other partial results) for each run of neighbouring rows; None: there are more than
        `_MOST_RUNS`, and one kernel for all of them is faster.
    """
    starts = np.cumsum([0] + [len(part) for part in rows])
    found: list[tuple[slice, slice]] = []
    for call, part in enumerate(rows):
        if call == whole:
            continue
        cuts = [0, *(np.flatnonzero(np.diff(part) != 1) + 1).tolist(), len(part)]
        if len(found) + len(cuts) - 1 > _MOST_RUNS:
            return None
        for first, stop in pairwise(cuts):
            into, other = int(starts[whole] + part[first]), int(starts[call] + first)
            found.append((slice(into, into + stop - first), slice(other, other + stop - first)))
    return found


def merge_table(rows: np.ndarray, num_rows: int) -> torch.Tensor:
    """Which partial results belong to each row. `rows`: int64 [E], the row of each of E partial results.

    Returns:
        int64 [num_rows, n], ascending indices of results, where n is the largest number for a row; padded with E.
    """
    counts = np.bincount(rows, minlength=num_rows)
    order = np.argsort(rows, kind="stable")
    first = np.cumsum(counts) - counts
    table = np.full((num_rows, int(counts.max(initial=1))), len(rows), dtype=np.int64)
    table[rows[order], np.arange(len(rows)) - first[rows[order]]] = order
    return torch.from_numpy(table)


def indptr(counts: Sequence[int]) -> np.ndarray:
    """int32 [n + 1], where each of n consecutive parts begins, and the end."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
