"""The plan of a step over the requests' work. While all requests decode, the previous plan is extended instead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from runtime.batch import ForwardBatch, Span
from runtime.request import Work
from runtime.reuse.build import build


class Planned(NamedTuple):
    """A planned step.

    Attributes:
        logit_rows: each row set's rows of the logits: by piece of work, then by row set.
        saved: hidden states that each row set saves, float32 [n, hidden], in the same order.
        row_layers: the cost of the step, as the number of rows x layers that it computes.
        version: equal for steps that extend the same plan: they have the same rows of the same requests.
    """

    batch: ForwardBatch
    logit_rows: list[list[slice]]
    saved: list[list[torch.Tensor | None]]
    row_layers: int
    version: int


class Planner:
    """Plans steps. If all requests just decode on, the last plan is reused, with longer lengths.

    A step that verifies drafts gets a new plan; the kept plan remains for the steps after it.

    The kept plan is changed in place, so a step must have been launched before the next step is planned. The device
    reads copies.

    Attributes:
        least_saved_tokens: see `build`; another value counts from the next new plan on.
    """

    def __init__(
        self, num_layers: int, page_size: int, hidden_size: int, device: torch.device, least_saved_tokens: int
    ):
        """See `build`."""
        self._num_layers, self._page_size = num_layers, page_size
        self._hidden_size, self._device, self.least_saved_tokens = hidden_size, device, least_saved_tokens
        self._last: _Steady | None = None
        self._versions = count(1)

    def plan(self, work: Sequence[Work]) -> Planned:
        """Plan a step over pieces of work, at most one for each request."""
        last, self._last = self._last, None  # if planning fails, the next step gets a new plan
        made = last if last is not None and last.grow(work) else self._plan(work)
        if isinstance(made, Planned):
            self._last = last
            return made
        self._last = made
        return made.planned

    def _plan(self, work: Sequence[Work]) -> Planned | _Steady:
        sets = [item.request.lease.rows(item) for item in work]
        for item, several in zip(work, sets, strict=True):
            for one in several:
                one.adapter = item.request.namespace.adapter
        plan = build(
            [one for several in sets for one in several],
            self._num_layers,
            self._page_size,
            self._hidden_size,
            self._device,
            self.least_saved_tokens,
        )
        version = 0
        for group in plan.batch.groups:
            version = group.attention.version = next(self._versions)
        total = 0
        for item, several in zip(work, sets, strict=True):
            row_layers = sum(one.row_layers for one in several)
            item.request.row_layers += row_layers
            total += row_layers
        logits, saved = iter(plan.logits), iter(plan.saved)
        logit_rows = [[next(logits) for _ in several] for several in sets]
        planned = Planned(plan.batch, logit_rows, [[next(saved) for _ in several] for several in sets], total, version)
        tails = _tails(planned, work, self._page_size)
        return planned if tails is None else _Steady(planned, work, tails, self._page_size)


class _Steady:
    """A plan that can be extended: each request computes one row, for its last token."""

    def __init__(self, planned: Planned, work: Sequence[Work], tails: Sequence[Span], page_size: int):
        """`tails`: for each row of the step, the span that ends with the row's own KV."""
        self.planned = planned
        self._page_size, self._work = page_size, work
        self._reads = [item.request.num_reads for item in work]
        self._order = [logit_rows[0].start for logit_rows in planned.logit_rows]
        self._tails = tails

    def grow(self, work: Sequence[Work]) -> bool:
        """Turn this plan into the plan of `work`. Returns False and changes nothing if `work` needs a new plan."""
        if len(work) != len(self._work):
            return False
        grown = []
        for item, before, num_reads in zip(work, self._work, self._reads, strict=True):
            request = item.request
            follows = request is before.request and item.start > before.start and request.num_reads == num_reads
            if not follows or item.num_rows != 1 or not item.samples:
                return False
            grown.append(item.start - before.start)
        batch, each = self.planned.batch, self.planned.row_layers // len(work)
        group, tokens = batch.groups[0], np.empty(len(work), dtype=np.int64)
        slots = group.kv_write.numpy()
        slots[self._order] += grown
        batch.positions.numpy()[self._order] += grown
        for row, item, more in zip(self._order, work, grown, strict=True):
            request, span = item.request, self._tails[row]
            request.row_layers += each
            sequence = request.sequence
            tokens[row] = 0 if item.ahead else sequence.tokens[-1]  # 0: it is on the device
            span.length += more
            page, rest = divmod(item.start - sequence.start, self._page_size)
            if rest < more:
                fresh = sequence.pages[page - (more - rest - 1) // self._page_size : page + 1]
                span.pages = np.append(span.pages, np.frombuffer(fresh, dtype=np.int32))
                slots[row] = sequence.pages[page] * self._page_size + rest
        for state in batch.states:
            item = work[self._order.index(state.first)]
            new = item.request.lease.take_slots(item)
            assert new is not None
            state.slot, state.target, state.accepted = new.slot, new.target, new.accepted
        batch.tokens = torch.from_numpy(tokens)
        self._work = work
        return True


def _tails(planned: Planned, work: Sequence[Work], page_size: int) -> list[Span] | None:
    """For each row, the span that grows with its request; None: the plan cannot be extended."""
    batch = planned.batch
    if not len(work) == len(batch.tokens) == len(batch.logits_rows) or len(batch.groups) != 1:
        return None
    for item in work:
        sequence = item.request.sequence
        if not item.request.lease.steady or item.count != 1 or not item.samples:
            return None
        if sequence.anchors[-1][0] > item.start:
            return None
    (group,) = batch.groups
    if group.load or batch.axes is not None:  # of rows that are no text; later rows are
        return None
    pages = (group.kv_write.numpy() // page_size).tolist()
    found = {
        edge.rows.start: span
        for edge in group.attention.edges
        if isinstance(edge.rows, slice) and edge.rows.stop == edge.rows.start + 1
        if (span := group.attention.spans[edge.span]).pages[-1] == pages[edge.rows.start] and edge.visible is None
    }
    return [found[row] for row in range(len(work))] if len(found) == len(work) else None
