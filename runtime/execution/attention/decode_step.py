"""Decode steps as levels: what each row reads alone, and what neighbouring rows share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.batch import AttentionPlan, Span
from runtime.execution.attention.paged_index import PagedIndex, indptr

# Index arrays of a virtual request: (number of queries, page ids, used rows of the last page).
_Request = tuple[int, np.ndarray, int]
_NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Shared:
    """A span that rows `first` to `stop` (exclusive) read."""

    first: int
    stop: int
    span: Span


@dataclass(slots=True)
class DecodeStep:
    """An attention plan of one row for each request, without shifts and custom masks.

    Attributes:
        own: for each row, the span that it alone reads.
        levels: what rows share. The rows of a level's spans ascend and do not overlap.
        window: how many of the last keys of its own span a row sees; None: all.
    """

    own: Sequence[Span]
    levels: Sequence[Sequence[Shared]] = ()
    window: int | None = None

    def own_index(self, size: int, spare: int, page_size: int) -> PagedIndex:
        """A virtual request for each of `size` rows; rows that the step does not have read one row of page `spare`."""
        requests = [(1, span.pages, _used(span, page_size)) for span in self.own]
        missing = (1, np.array([spare], dtype=np.int32), 1)
        return _index(requests + [missing] * (size - len(requests)), np.arange(size))

    def shared_index(self, size: int, edges: int, page_size: int) -> PagedIndex | None:
        """`edges` virtual requests for the queries of `size` rows, on each level in turn; None: there are more.

        Rows that share nothing on a level are queries of a request without pages; what is computed for them has no
        weight. The last requests have no queries.
        """
        requests: list[_Request] = []
        for level in self.levels:
            done = 0
            for shared in level:
                if shared.first > done:
                    requests.append((shared.first - done, _NO_PAGES, 0))
                span = shared.span
                requests.append((shared.stop - shared.first, span.pages, _used(span, page_size)))
                done = shared.stop
            if size > done:
                requests.append((size - done, _NO_PAGES, 0))
        if len(requests) > edges:
            return None
        requests += [(0, _NO_PAGES, 0)] * (edges - len(requests))
        return _index(requests, np.tile(np.arange(size), len(self.levels)))


def decode_step(plan: AttentionPlan) -> DecodeStep | None:
    """The plan as a decode step; None: it needs other masks or shifts, or a row reads several spans alone or none."""
    own: list[Span | None] = [None] * plan.num_rows
    shared: list[Shared] = []
    windows: set[int] = set()
    longest = 0
    for edge in plan.edges:
        span, rows = plan.spans[edge.span], edge.rows
        if edge.visible is not None or span.keep is not None or span.shift or not isinstance(rows, slice):
            return None
        if rows.stop - rows.start > 1:
            if edge.hidden is not None:
                return None
            shared.append(Shared(rows.start, rows.stop, span))
        elif own[rows.start] is None:
            own[rows.start] = span
            if edge.hidden is None:
                longest = max(longest, span.length)
            else:
                windows.add(span.length - int(edge.hidden[0]))
        else:
            return None
    window = min(windows, default=None)
    found = [span for span in own if span is not None]
    if len(found) < plan.num_rows or (window is not None and max(longest, *windows) > window):
        return None
    return DecodeStep(found, _levels(shared), window)


def _levels(every: Sequence[Shared]) -> list[list[Shared]]:
    """Place each shared span on the first level where its rows are free."""
    levels: list[list[Shared]] = []
    for shared in sorted(every, key=lambda one: (one.first, -one.stop)):
        level = next((level for level in levels if level[-1].stop <= shared.first), None)
        if level is None:
            levels.append([shared])
        else:
            level.append(shared)
    return levels


def _used(span: Span, page_size: int) -> int:
    return (span.length - 1) % page_size + 1


def _index(requests: Sequence[_Request], rows: np.ndarray) -> PagedIndex:
    queries, pages, used = zip(*requests, strict=True)
    return PagedIndex(
        rows=rows,
        qo_indptr=indptr(queries),
        kv_indptr=indptr([len(table) for table in pages]),
        kv_indices=np.concatenate(pages),
        last_page_len=np.array(used, dtype=np.int32),
        shift=np.zeros(len(rows), dtype=np.int64),
    )
