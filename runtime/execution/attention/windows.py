"""Sliding windows: layers whose rows see only the nearest keys before them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge, ForwardBatch, LayerGroup, rows_of
from runtime.execution.attention.paged_index import causal_window, visible_of
from runtime.kv.near import NearPages


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a layer: which positions up to its own a row sees.

    Attributes:
        size: number of positions, the row's own included.
        chunked: whether positions are divided into fixed chunks of `size`, and a row sees only its own chunk.
    """

    size: int
    chunked: bool = False

    def first(self, positions: np.ndarray) -> np.ndarray:
        """The first visible position for each of `positions`, int64; negative: all positions are visible."""
        return positions // self.size * self.size if self.chunked else positions - self.size + 1


def within(plan: AttentionPlan, positions: np.ndarray, window: Window, page_size: int) -> AttentionPlan:
    """Narrow a plan, whose rows have int64 `positions`, to a window; whole pages that no row sees are left out."""
    narrow = AttentionPlan(plan.num_rows)
    for edge in plan.edges:
        span, visible = plan.spans[edge.span], visible_of(edge, plan)
        first = window.first(positions[rows_of(edge, plan.num_rows)]) - span.position
        hidden = np.clip(first, 0, visible).astype(np.int32)
        if (hidden == visible).all():
            continue
        skipped = int(hidden.min()) // page_size
        rows = skipped * page_size
        rest = replace(
            span,
            pages=span.pages[skipped:],
            length=span.length - rows,
            keep=None if span.keep is None else span.keep[rows:],
            position=span.position + rows,
        )
        seen = None if edge.visible is None else edge.visible - np.int32(rows)
        narrow.add(edge.rows, rest, seen, hidden - np.int32(rows) if (hidden > rows).any() else None)
    return narrow


@dataclass(frozen=True, slots=True)
class LayerWindows:
    """The windows of a model's layers.

    Attributes:
        by_layer: the window of each layer; None: the layer sees all positions.
        near: the pool of the layers with a window, if they have one of their own.
        is_rotated_apart: whether the rotary embedding of layers with a window differs, so that they form groups of
            their own in every step.
    """

    by_layer: Sequence[Window | None]
    page_size: int
    near: NearPages | None
    is_rotated_apart: bool

    def narrow(self, batch: ForwardBatch, last: int) -> ForwardBatch:
        """The batch within the windows; `last`: its largest position."""
        is_split = self.is_rotated_apart or self.near is not None
        if is_split or last >= min(window.size for window in self.by_layer if window):
            return narrowed(batch, self.by_layer, self.page_size, self.near)
        return batch


def narrowed(
    batch: ForwardBatch, windows: Sequence[Window | None], page_size: int, near: NearPages | None = None
) -> ForwardBatch:
    """Split the layer groups of a batch wherever the window of the layers changes, and narrow their plans.

    Layers with the same window share a plan. If all positions are within the window, the plan is not changed. With
    `near`, plans and written slots of layers with a window are those of its pool.
    """
    groups: list[LayerGroup] = []
    for group in batch.groups:
        positions = (batch.positions if group.rows is None else batch.positions[group.rows]).numpy()
        runs = [(window, [*layers]) for window, layers in groupby(group.layers, key=windows.__getitem__)]
        plans: dict[Window | None, AttentionPlan] = {None: group.attention}
        last = int(positions.max(initial=0))
        written = None if near is None else torch.from_numpy(near.slots(group.kv_write.numpy()))
        for window, layers in runs:
            if window is not None and window not in plans:
                reaches = last >= window.size
                plan = within(group.attention, positions, window, page_size) if reaches else group.attention
                plans[window] = plan if near is None else _placed(plan, near)
            part = replace(group, layers=range(layers[0], layers[-1] + 1), attention=plans[window], load=[], save=[])
            if written is not None and window is not None:
                part.kv_write = written
            groups.append(part)
        groups[-len(runs)].load, groups[-1].save = group.load, group.save
    return replace(batch, groups=groups)


def windowed(plan: AttentionPlan, page_size: int) -> tuple[AttentionPlan, int | None]:
    """A plan within a window in the form of kernels that know windows, but only of causal edges.

    Where rows see only a part of a shared span, each request reads all its spans as one instead. So it shares nothing,
    but reads no more than a window.

    Returns:
        The plan, and `causal_window` of it. A plan whose spans do not follow each other is not changed.
    """
    hidden = [edge for edge in plan.edges if edge.hidden is not None]
    if not hidden:
        return plan, None
    window = causal_window(plan)
    if window is None or any(edge.visible is None and len(rows_of(edge, plan.num_rows)) > 1 for edge in hidden):
        plan = _joined(plan, page_size)
        window = causal_window(plan)
    return plan, window


def _joined(plan: AttentionPlan, page_size: int) -> AttentionPlan:
    """The plan with one edge for each request; the same plan if that is not possible."""
    of_row: list[list[int]] = [[] for _ in range(plan.num_rows)]
    for i, edge in enumerate(plan.edges):
        for row in rows_of(edge, plan.num_rows):
            of_row[row].append(i)
    joined = AttentionPlan(plan.num_rows)
    for found, members in groupby(range(plan.num_rows), key=of_row.__getitem__):
        edges = sorted((plan.edges[i] for i in found), key=lambda edge: plan.spans[edge.span].position)
        rows = [*members]
        if edges and not _join(plan, edges, slice(rows[0], rows[-1] + 1), page_size, joined):
            return plan
    return joined


def _join(plan: AttentionPlan, edges: Sequence[Edge], rows: slice, page_size: int, into: AttentionPlan) -> bool:
    """Add one edge for `rows` in place of `edges`, which are in order. Returns False if their spans do not fit."""
    every = np.arange(rows.start, rows.stop)
    spans = [plan.spans[edge.span] for edge in edges]
    hides = [_hidden(edge, plan, every) for edge in edges]
    while len(spans) > 1 and (hides[0] == spans[0].length).all():
        del spans[0], hides[0]
    *before, own = edges[-len(spans) :]
    if any(span.keep is not None or span.shift for span in spans) or any(edge.visible is not None for edge in before):
        return False
    if any(a.position + a.length != b.position or a.length % page_size for a, b in pairwise(spans)):
        return False
    if own.visible is None and len(every) > 1:
        return False
    length = sum(span.length for span in spans)
    visible: np.ndarray | None = None
    if own.visible is not None:
        visible = own.visible[_places(own, plan, every)] + np.int32(length - spans[-1].length)
    hidden = np.stack(hides).sum(0, dtype=np.int32)  # behind rows that are not hidden, none are
    skipped = int(hidden.min()) // page_size
    unread = np.int32(skipped * page_size)
    pages = np.concatenate([span.pages for span in spans])[skipped:]
    span = replace(spans[0], pages=pages, length=length - int(unread), position=spans[0].position + int(unread))
    hidden -= unread
    into.add(rows, span, None if visible is None else visible - unread, hidden if hidden.any() else None)
    return True


def _places(edge: Edge, plan: AttentionPlan, rows: np.ndarray) -> np.ndarray:
    """Where some rows are among an edge's rows."""
    every = rows_of(edge, plan.num_rows)
    order = np.argsort(every)
    return order[np.searchsorted(every, rows, sorter=order)]


def _hidden(edge: Edge, plan: AttentionPlan, rows: np.ndarray) -> np.ndarray:
    return np.zeros(len(rows), dtype=np.int32) if edge.hidden is None else edge.hidden[_places(edge, plan, rows)]


def _placed(plan: AttentionPlan, near: NearPages) -> AttentionPlan:
    """A plan that reads the pages where the pool of the layers with a window has them."""
    spans = [replace(span, pages=near.places[span.pages]) for span in plan.spans]
    assert all((span.pages >= 0).all() for span in spans), "a row sees a page that has no place"
    return AttentionPlan(plan.num_rows, spans, plan.edges)
