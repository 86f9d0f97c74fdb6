"""The `prefix` strategy: the longest cached prefix exists in all layers, the suffix is computed in all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span
from runtime.scheduler import Work


def plan_prefix(work: Sequence[Work], num_layers: int, page_size: int, device: torch.device) -> ForwardBatch:
    """One step over causal requests: each computes its next `count` tokens against all pages before them.

    Sets `logits` of each piece of work.

    Args:
        work: requests whose page tables cover the rows to be computed.
        num_layers: layers of the model; they form one group.
        page_size: tokens in a page.
        device: where the tensors go.
    """
    total = sum(item.count for item in work)
    tokens = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    attention = AttentionPlan(total)
    logits_rows: list[int] = []
    row = 0
    for item in work:
        request, start = item.request, item.request.num_computed
        end, rows = start + item.count, slice(row, row + item.count)
        tokens[rows] = request.tokens[start:end]
        positions[rows] = np.arange(start, end)
        pages = np.array(request.pages[: -(-end // page_size)], dtype=np.int32)
        slots[rows] = pages[positions[rows] // page_size].astype(np.int64) * page_size + positions[rows] % page_size
        attention.add(rows, Span(pages, end), "causal")
        row = rows.stop
        wanted = _wanted_rows(item, rows)
        item.logits = slice(len(logits_rows), len(logits_rows) + len(wanted))
        logits_rows.extend(wanted)
    return ForwardBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        groups=[LayerGroup(range(num_layers), None, torch.from_numpy(slots).to(device), attention)],
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
    )


def _wanted_rows(item: Work, rows: slice) -> range:
    """Flat rows of a piece of work whose logits are wanted: the last one if it samples, more for prompt logprobs."""
    request = item.request
    if request.wants_prompt_logprobs:
        skipped = max((request.prompt_logprobs_from or 0) - 1 - request.num_computed, 0)
        return range(min(rows.start + skipped, rows.stop), rows.stop)
    return range(rows.stop - 1, rows.stop) if item.samples else range(0)
