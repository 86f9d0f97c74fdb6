"""Attention plans as CUDA graphs can compute them: what each request reads alone, and levels of what rows share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.batch import AttentionPlan, Span
from runtime.execution.attention.paged_index import PagedIndex, indptr, is_causal

# Index arrays of a virtual request: (number of queries, page ids, used rows of the last page).
_Request = tuple[int, np.ndarray, int]
_NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Reader:
    """Rows `first` to `stop` (exclusive), which read a span."""

    first: int
    stop: int
    span: Span


@dataclass(slots=True)
class GraphStep:
    """An attention plan without shifts and custom masks.

    Attributes:
        own: what the rows of each request alone read. The last row sees the whole span, each row one key more than the
            row before it. Together they have all rows, in order.
        levels: what rows share, whole spans. The rows of a level's spans ascend and do not overlap.
        window: how many of the last keys that it would see of its own span a row sees; None: all.
    """

    own: Sequence[Reader]
    levels: Sequence[Sequence[Reader]] = ()
    window: int | None = None

    @property
    def num_rows(self) -> int:
        return self.own[-1].stop if self.own else 0

    @property
    def decodes(self) -> bool:
        """Whether each request has one row."""
        return len(self.own) == self.num_rows

    def own_index(self, size: int, requests: int, spare: int, page_size: int) -> PagedIndex | None:
        """`requests` virtual requests for `size` rows; None: there are more.

        Rows that the step does not have read page `spare`, of which they write what they see. With as many requests as
        rows, each is a request; otherwise they are one. Requests behind it have no queries.
        """
        found = [(one.stop - one.first, one.span.pages, _used(one.span.length, page_size)) for one in self.own]
        unused = size - self.num_rows
        if unused:
            count = 1 if requests == size else unused
            pages = np.full(-(-count // page_size), spare, dtype=np.int32)
            found += [(count, pages, _used(count, page_size))] * (unused // count)
        return _index(found, requests, np.arange(size))

    def shared_index(self, size: int, edges: int, page_size: int) -> PagedIndex | None:
        """`edges` virtual requests for the queries of `size` rows, on each level in turn; None: there are more.

        Rows that share nothing on a level are queries of a request without pages; what is computed for them has no
        weight. The last requests have no queries.
        """
        found: list[_Request] = []
        for level in self.levels:
            done = 0
            for one in level:
                if one.first > done:
                    found.append((one.first - done, _NO_PAGES, 0))
                found.append((one.stop - one.first, one.span.pages, _used(one.span.length, page_size)))
                done = one.stop
            if size > done:
                found.append((size - done, _NO_PAGES, 0))
        return _index(found, edges, np.tile(np.arange(size), len(self.levels)))


def graph_step(plan: AttentionPlan, window: int | None) -> GraphStep | None:
    """The plan as a step of a graph; None: it needs other masks or shifts, or a row reads several spans alone or none.

    `plan`, `window`: what `windowed` returns.
    """
    own: list[Reader] = []
    shared: list[Reader] = []
    has_window = False
    for edge in plan.edges:
        span, rows = plan.spans[edge.span], edge.rows
        if span.keep is not None or span.shift or not isinstance(rows, slice):
            return None
        reader = Reader(rows.start, rows.stop, span)
        if edge.visible is None and rows.stop - rows.start > 1:
            if edge.hidden is not None:
                return None
            shared.append(reader)
            continue
        if edge.visible is not None and not (is_causal(edge.visible) and edge.visible[-1] == span.length):
            return None
        own.append(reader)
        has_window |= edge.hidden is not None
    own.sort(key=lambda one: one.first)
    firsts, stops = [one.first for one in own], [one.stop for one in own]
    if [*firsts, plan.num_rows] != [0, *stops] or (has_window and window is None):
        return None
    return GraphStep(own, _levels(shared), window)


def _levels(every: Sequence[Reader]) -> list[list[Reader]]:
    """Place each shared span on the first level where its rows are free."""
    levels: list[list[Reader]] = []
    for shared in sorted(every, key=lambda one: (one.first, -one.stop)):
        level = next((level for level in levels if level[-1].stop <= shared.first), None)
        if level is None:
            levels.append([shared])
        else:
            level.append(shared)
    return levels


def _used(length: int, page_size: int) -> int:
    return (length - 1) % page_size + 1


def _index(found: Sequence[_Request], requests: int, rows: np.ndarray) -> PagedIndex | None:
    """Index arrays of some virtual requests and of others without queries, up to `requests`; None: there are more."""
    if len(found) > requests:
        return None
    others = [(0, _NO_PAGES, 0)] * (requests - len(found))
    queries, pages, used = zip(*found, *others, strict=True)
    return PagedIndex(
        rows=rows,
        qo_indptr=indptr(queries),
        kv_indptr=indptr([len(table) for table in pages]),
        kv_indices=np.concatenate(pages),
        last_page_len=np.array(used, dtype=np.int32),
        shift=np.zeros(len(rows), dtype=np.int64),
    )
