"""The `prefix` strategy: the longest cached prefix exists in all layers, the suffix is computed in all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span, causal_visible
from runtime.engine.scheduler import Work
from runtime.reuse.cascade import Stretch, stretches


def plan_prefix(work: Sequence[Work], num_layers: int, page_size: int, least_saved_tokens: int = 256) -> ForwardBatch:
    """One step over causal requests: each computes its next `count` tokens against all pages before them.

    Pages that several requests read are one span with the rows of all of them (tree attention); the rows come in the
    order of the page tables, so that those are neighbours. Sets `logits` of each piece of work. Tokens that nobody has
    read yet (`ahead`) are left 0.

    Args:
        work: requests whose page tables cover the rows to be computed.
        num_layers: layers of the model; they form one group.
        page_size: tokens in a page.
        least_saved_tokens: see `stretches`.
    """
    total = sum(item.count for item in work)
    tokens = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    attention = AttentionPlan(total)
    logits_rows: list[int] = []
    row = 0
    ends = [item.request.num_computed + item.ahead + item.count for item in work]
    tables = [item.request.pages[: -(-end // page_size)].tobytes() for item, end in zip(work, ends, strict=True)]
    order = sorted(range(len(work)), key=tables.__getitem__)
    starts = []
    for i in order:
        item, end = work[i], ends[i]
        request, start = item.request, end - item.count
        rows = slice(row, row + item.count)
        starts.append(row)
        tokens[rows] = 0 if item.ahead else request.tokens[start:end]
        positions[rows] = np.arange(start, end)
        pages = np.frombuffer(tables[i], dtype=np.int32)
        slots[rows] = pages[positions[rows] // page_size].astype(np.int64) * page_size + positions[rows] % page_size
        row = rows.stop
        wanted = _wanted_rows(item, rows)
        item.logits = slice(len(logits_rows), len(logits_rows) + len(wanted))
        logits_rows.extend(wanted)
    starts.append(row)
    shared = stretches([tables[i] for i in order], page_size, least_saved_tokens)
    _attend(attention, shared, [tables[i] for i in order], [ends[i] for i in order], starts, page_size)
    return ForwardBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        groups=[LayerGroup(range(num_layers), None, torch.from_numpy(slots), attention)],
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
    )


def _attend(
    attention: AttentionPlan,
    shared: Sequence[Stretch],
    tables: Sequence[bytes],
    ends: Sequence[int],
    starts: Sequence[int],
    page_size: int,
) -> None:
    """Add the edges of sorted requests: `ends` are their tokens after the step, `starts` their first rows."""
    for stretch in shared:
        pages = np.frombuffer(tables[stretch.first], dtype=np.int32)[stretch.start : stretch.stop]
        rows = slice(starts[stretch.first], starts[stretch.last])
        if stretch.last - stretch.first > 1:
            attention.add(rows, Span(pages, len(pages) * page_size))
        else:
            length = ends[stretch.first] - stretch.start * page_size
            attention.add(rows, Span(pages, length), causal_visible(length, rows.stop - rows.start))


def _wanted_rows(item: Work, rows: slice) -> range:
    """Flat rows of a piece of work whose logits are wanted: the last one if it samples, more for prompt logprobs."""
    request = item.request
    if request.wants_prompt_logprobs:
        skipped = max((request.prompt_logprobs_from or 0) - 1 - request.num_computed, 0)
        return range(min(rows.start + skipped, rows.stop), rows.stop)
    return range(rows.stop - 1, rows.stop) if item.samples else range(0)
