"""The `bicache` strategy (section 5.2): a shared prefix exists in the first layers, the others are refreshed.

With depth d, layers 1 to d read the KV that was computed for the prefix alone, and no other layer does. At a refresh
the prefix's rows join before layer d, with the states they left layer d - 1 with when the prefix was encoded: layer d
still reads the cached KV, but its output has seen the request, so layer d + 1 projects keys and values of this request.
Joining after layer d would reuse layer d + 1 as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from runtime.batch import AttentionPlan, ForwardBatch, HiddenRows, LayerGroup, Span
from runtime.engine.denoise_request import DenoiseWork


@dataclass(slots=True)
class Stage:
    """What a request does in some layers.

    Attributes:
        layers: which.
        prefix: its rows are `absent`, computed `apart` (as if the prefix were alone), or `joined` with the others.
        shared: whether the prefix's KV is read from the tree; else from the request's own pages.
    """

    layers: range
    prefix: Literal["absent", "apart", "joined"]
    shared: bool


def stages(item: DenoiseWork, num_layers: int) -> list[Stage]:
    """A request's stages in one step, from the first layer to the last; none is empty."""
    request, depth = item.request, item.request.depth
    if request.is_encoding or not request.prefix_len:
        found = [Stage(range(num_layers), "absent", False)]
    elif not item.refresh:
        found = [Stage(range(depth), "absent", True), Stage(range(depth, num_layers), "absent", False)]
    else:
        entry = entry_layer(depth)
        before: Literal["absent", "apart"] = "absent" if request.boundary is not None else "apart"
        found = [
            Stage(range(entry), before, True),
            Stage(range(entry, depth), "joined", True),
            Stage(range(depth, num_layers), "joined", False),
        ]
    return [stage for stage in found if stage.layers]


def entry_layer(depth: int) -> int:
    """The index of the layer before which the prefix's rows join; at 0 they join as embeddings."""
    return max(depth - 1, 0)


class _Rows:
    """A canvas's place in a step: its flat rows, first those of the step, then the prefix's at a refresh.

    Attributes:
        is_guide: whether this is the canvas without its prompt, which shares nothing.
    """

    def __init__(self, item: DenoiseWork, start: int, num_layers: int, page_size: int, is_guide: bool = False):
        request = item.request
        self.item, self.start, self.page_size, self.is_guide = item, start, page_size, is_guide
        self.stages = [Stage(range(num_layers), "absent", False)] if is_guide else stages(item, num_layers)
        self.active = item.unprompted_rows if is_guide else item.rows
        self.num_active = len(self.active)
        self.num_prefix = request.prefix_len if item.refresh and not is_guide else 0
        self.length = request.prefix_len if request.is_encoding else request.length
        pages = np.array(request.pages, dtype=np.int32)
        # While the prefix is encoded, the pages that will be the tree's are still the request's, and come first.
        num_shared = request.prefix_len // page_size if request.encoding else 0
        num_own = -(-self.length // page_size)
        self.shared = pages[:num_shared]
        own = self.shared if request.is_encoding else pages[num_shared:]
        self.own = own[num_own:] if is_guide else own[:num_own]
        self.positions = np.concatenate((np.arange(self.active.start, self.active.stop), np.arange(self.num_prefix)))
        self.slots = self.own[self.positions // page_size].astype(np.int64) * page_size + self.positions % page_size

    @property
    def num_rows(self) -> int:
        return self.num_active + self.num_prefix

    @property
    def tokens(self) -> np.ndarray:
        denoiser = self.item.request.denoiser
        tokens = denoiser.tokens[self.positions]
        return (
            np.where(self.positions < denoiser.prompt_len, denoiser.spec.mask_token_id, tokens)
            if self.is_guide
            else tokens
        )

    def stage(self, layer: int) -> Stage:
        return next(stage for stage in self.stages if layer in stage.layers)

    @property
    def prefix(self) -> np.ndarray:
        """Flat rows of the prefix: while encoding they are all there are."""
        first = 0 if self.item.request.is_encoding else self.num_active
        return np.arange(self.start + first, self.start + self.num_rows)

    def alive(self, stage: Stage) -> int:
        return self.num_active + (0 if stage.prefix == "absent" else self.num_prefix)

    def writes(self, stage: Stage) -> np.ndarray:
        """Pool slots of the rows alive; -1 for rows whose KV the tree has."""
        slots = self.slots[: self.alive(stage)].copy()
        if stage.shared:
            slots[self.num_active :] = -1
        return slots

    def attend(self, attention: AttentionPlan, stage: Stage, row: int) -> None:
        """Add what this request alone reads; `row` is its first row in the group."""
        rows = slice(row, row + self.alive(stage))
        if stage.shared:
            own = slice(row, row + self.num_active) if stage.prefix == "apart" else rows
            skipped = self.item.request.prefix_len
            attention.add(own, Span(self.own[skipped // self.page_size :], self.length - skipped))
        else:
            attention.add(rows, Span(self.own, self.length))


def plan_denoise(
    work: Sequence[DenoiseWork], num_layers: int, hidden_size: int, page_size: int, device: torch.device
) -> ForwardBatch:
    """One step over requests that encode, denoise or refresh, each with its own depth.

    Sets `logits` and `unprompted_logits` of each piece of work, and `boundary` where boundary states are computed.

    Args:
        work: requests that hold all their pages.
        num_layers: layers of the model.
        hidden_size: width of its hidden states.
        page_size: tokens in a page.
        device: where boundary states are kept.
    """
    rows: list[_Rows] = []
    start = 0
    # Requests with the same prefix become neighbours, so that its pages are read once for all of them.
    for item in sorted(work, key=lambda item: item.request.encoding):
        for is_guide in (False, True) if item.unprompted_rows else (False,):
            rows.append(_Rows(item, start, num_layers, page_size, is_guide))
            start += rows[-1].num_rows
    groups = [_group(rows, range(*cut), start, page_size) for cut in pairwise(sorted(_cuts(rows) | {num_layers}))]
    for one in rows:
        _carry_boundary(one, groups, hidden_size, device)
    logits_rows: list[np.ndarray] = []
    count = 0
    for one in rows:
        wanted = _wanted_rows(one)
        place = slice(count, count + len(wanted))
        if one.is_guide:
            one.item.unprompted_logits = place
        else:
            one.item.logits = place
        logits_rows.append(wanted)
        count += len(wanted)
    return ForwardBatch(
        tokens=torch.from_numpy(np.concatenate([r.tokens for r in rows])),
        positions=torch.from_numpy(np.concatenate([r.positions for r in rows])),
        groups=groups,
        logits_rows=torch.from_numpy(np.concatenate(logits_rows)),
    )


def _cuts(rows: Sequence[_Rows]) -> set[int]:
    """Layers at which a group begins: the union over all requests."""
    found = {0}
    for one in rows:
        found |= {stage.layers.start for stage in one.stages}
        if one.item.request.is_encoding:
            found.add(entry_layer(one.item.request.depth))
    return found


def _group(rows: Sequence[_Rows], layers: range, total: int, page_size: int) -> LayerGroup:
    attention = AttentionPlan(0)
    alive: list[np.ndarray] = []
    writes: list[np.ndarray] = []
    last: bytes | None = None
    first, edge = 0, -1
    for one in rows:
        stage, row = one.stage(layers.start), attention.num_rows
        count = one.alive(stage)
        attention.num_rows += count
        shared = one.shared.tobytes() if stage.shared else None
        if shared is not None and shared == last:
            attention.edges[edge].rows = slice(first, row + count)
        elif shared is not None:
            first, edge = row, len(attention.edges)
            attention.add(slice(row, row + count), Span(one.shared, len(one.shared) * page_size))
        last = shared
        one.attend(attention, stage, row)
        alive.append(np.arange(one.start, one.start + count))
        writes.append(one.writes(stage))
    return LayerGroup(
        layers,
        None if attention.num_rows == total else torch.from_numpy(np.concatenate(alive)),
        torch.from_numpy(np.concatenate(writes)),
        attention,
    )


def _carry_boundary(one: _Rows, groups: Sequence[LayerGroup], hidden_size: int, device: torch.device) -> None:
    """Let the prefix's rows enter with the states that are known, or keep those that this step computes."""
    item, request = one.item, one.item.request
    entry = entry_layer(request.depth)
    if one.is_guide or not entry or not (item.refresh or request.is_encoding):
        return
    prefix = torch.from_numpy(one.prefix)
    if request.boundary is not None:
        next(g for g in groups if g.layers.start == entry).load.append(HiddenRows(prefix, request.boundary))
    else:
        item.boundary = torch.empty(len(prefix), hidden_size, device=device)
        next(g for g in groups if g.layers.stop == entry).save.append(HiddenRows(prefix, item.boundary))


def _wanted_rows(one: _Rows) -> np.ndarray:
    """Flat rows whose logits are wanted: those that belong to the masks of the block."""
    if one.item.request.is_encoding:
        return np.empty(0, dtype=np.int64)
    denoiser = one.item.request.denoiser
    return one.start + denoiser.candidates() - denoiser.spec.logits_shift - one.active.start
