"""The rows of a BiCache step (section 5.2): a shared prefix exists in the first layers, the others are refreshed.

With depth d, layers 1 to d read the KV that was computed for the prefix alone, and no other layer does. At a refresh
the prefix's rows join before layer d, with the states they left layer d - 1 with when the prefix was encoded: layer d
still reads the cached KV, but its output has seen the request, so layer d + 1 projects keys and values of this request.
Joining after layer d would reuse layer d + 1 as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from radix import Namespace
from runtime.diffusion.canvas import Canvas
from runtime.request import Request, Work
from runtime.reuse.build import Read, RowSet, Stage


@dataclass(slots=True)
class Share:
    """The prefix that a diffusion request shares; settled anew each time it is looked up while it waits.

    Attributes:
        reuse, partial: whether prefixes are shared, and the beginnings of longer ones.
        declared: leading prompt tokens that requests share, as the request says; None: it does not.
        wanted_depth: layers in which the prefix is to be reused; None: as the table says.
        interval: denoising steps between two refreshes of the prefix.
        length: shared leading positions, whole pages; 0: none.
        encoded: tokens that were encoded together with them; more than `length` where part of an encoding matches.
        depth: layers in which they are reused.
        encoding: the prefix's namespace in the tree; None without reuse.
        is_encoding: whether the next step encodes the prefix alone.
        boundary: states with which the prefix enters layer `depth`, float32 [length, hidden], once they are known.
        refreshed_at: the number of the last denoising step that refreshed; -1: none has.
        refreshes: how many have.
    """

    reuse: bool = True
    partial: bool = False
    declared: int | None = None
    wanted_depth: int | None = None
    interval: int = 1
    length: int = 0
    encoded: int = 0
    depth: int = 0
    encoding: Namespace | None = None
    is_encoding: bool = False
    boundary: torch.Tensor | None = None
    refreshed_at: int = -1
    refreshes: int = 0

    @property
    def is_partial(self) -> bool:
        """Whether the prefix is the beginning of a longer encoding."""
        return self.encoding is not None and self.encoded > self.length


@dataclass(frozen=True, slots=True)
class Turn:
    """The rows of a denoising step beside its active ones.

    Attributes:
        refresh: whether the prefix's rows are computed in the layers in which it is not reused.
        unprompted: positions that are computed once more without the prompt, in all layers, for guidance.
    """

    refresh: bool = False
    unprompted: range = range(0)


def next_work(request: Request, num_layers: int) -> Work:
    """The next step of a request that has all its pages."""
    share, canvas = request.reuse, request.canvas
    if share.is_encoding:
        return Work(request, 0, share.length, share.length, detail=Turn())
    active = canvas.active(share.length)
    turn = Turn(
        refresh=_is_due(share, canvas) and share.length > 0 and share.depth < num_layers,
        unprompted=canvas.active(0) if canvas.params.cfg_scale else range(0),
    )
    num_rows = len(active) + (share.length if turn.refresh else 0) + len(turn.unprompted)
    return Work(request, active.start, len(active), num_rows, detail=turn)


def _is_due(share: Share, canvas: Canvas) -> bool:
    """Whether the prefix is refreshed: every `interval` steps; with a Fast-dLLM cache at a block's beginning."""
    if canvas.params.cache == "none":
        return canvas.num_steps % share.interval == 0
    since = canvas.num_steps - share.refreshed_at
    return canvas.is_block_start and (share.refreshed_at < 0 or since >= share.interval)


def plan_rows(work: Work, num_layers: int, page_size: int) -> list[RowSet]:
    """The row sets of a step: the canvas (or the prefix, while it is encoded), and the canvas without its prompt."""
    if work.request.reuse.is_encoding:
        return [_encode(work.request, num_layers, page_size)]
    sets = [_CanvasRows(work, page_size).row_set(num_layers)]
    if work.detail.unprompted:
        sets.append(_guide(work, num_layers, page_size))
    return sets


def entry_layer(depth: int) -> int:
    """The index of the layer before which the prefix's rows join; at 0 they join as embeddings."""
    return max(depth - 1, 0)


def _slots(pages: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    return pages[positions // page_size].astype(np.int64) * page_size + positions % page_size


def _encode(request: Request, num_layers: int, page_size: int) -> RowSet:
    """The prefix alone; the states with which it leaves the layer before its entry are saved."""
    (segment,), length = request.segments, request.reuse.length
    positions = np.arange(length)
    pages = np.frombuffer(segment.pages, dtype=np.int32)
    writes, reads = _slots(pages, positions, page_size), [Read(pages, length)]
    entry = entry_layer(request.reuse.depth)
    stages = [Stage(range(*cut), writes, reads) for cut in pairwise(sorted({0, entry, num_layers}))]
    if entry:
        stages[0].save = positions
    tokens = np.array(request.tokens[:length], dtype=np.int64)
    return RowSet(tokens, positions, stages, np.empty(0, dtype=np.int64))


def _guide(work: Work, num_layers: int, page_size: int) -> RowSet:
    """The canvas with masks in place of its prompt, which shares nothing; its pages follow those of the canvas."""
    canvas, rows = work.request.canvas, work.detail.unprompted
    length, spec = len(canvas.tokens), canvas.spec
    num_own = -(-length // page_size)
    pages = np.frombuffer(work.request.sequence.pages, dtype=np.int32)[num_own:]
    positions = np.arange(rows.start, rows.stop)
    tokens = np.where(positions < canvas.prompt_len, spec.mask_token_id, canvas.tokens[positions])
    stage = Stage(range(num_layers), _slots(pages, positions, page_size), [Read(pages, length)])
    return RowSet(tokens, positions, [stage], canvas.candidates() - spec.logits_shift - rows.start)


class _CanvasRows:
    """The rows of a canvas: first its active ones, then, at a refresh, those of the prefix."""

    def __init__(self, work: Work, page_size: int):
        request = work.request
        self.work, self.page_size = work, page_size
        self.share: Share = request.reuse
        self.tokens = request.canvas.tokens
        num_own = -(-len(self.tokens) // page_size)
        self.own = np.frombuffer(request.sequence.pages, dtype=np.int32)[:num_own]
        shared = request.segments[0].pages if request.segments else request.sequence.pages[:0]
        self.shared = np.frombuffer(shared, dtype=np.int32)
        self.num_active = work.count
        self.num_prefix = self.share.length if work.detail.refresh else 0
        active = np.arange(work.start, work.start + work.count)
        self.positions = np.concatenate((active, np.arange(self.num_prefix)))
        self.slots = _slots(self.own, self.positions, page_size)
        self.prefix_rows = np.arange(self.num_active, self.num_active + self.num_prefix)

    def row_set(self, num_layers: int) -> RowSet:
        share, depth = self.share, self.share.depth
        if not share.length:
            stages = [self._full(range(num_layers))]
        elif not self.num_prefix:
            stages = [self._without_prefix(range(depth)), self._full(range(depth, num_layers))]
        else:
            entry = entry_layer(depth)
            known = share.boundary is not None
            before = self._without_prefix(range(entry)) if known else self._apart(range(entry))
            joined, deep = self._joined(range(entry, depth)), self._full(range(depth, num_layers))
            if share.boundary is not None and entry:
                joined.load = self.prefix_rows, share.boundary
            elif entry:
                before.save = self.prefix_rows
            stages = [before, joined, deep]
        wanted = self.work.request.decoding.wanted(self.work)
        return RowSet(self.tokens[self.positions], self.positions, [s for s in stages if s.layers], wanted)

    def _full(self, layers: range) -> Stage:
        """All rows, which read and write the request's own pages alone."""
        return Stage(layers, self.slots, [Read(self.own, len(self.tokens))])

    def _without_prefix(self, layers: range) -> Stage:
        """The active rows alone; they read the cached prefix."""
        alive = np.arange(self.num_active) if self.num_prefix else None
        return Stage(layers, self.slots[: self.num_active], [self._prefix(), self._rest()], alive)

    def _apart(self, layers: range) -> Stage:
        """The active rows, and those of the prefix as if it were alone; the tree has their KV."""
        active = slice(0, self.num_active)
        return Stage(layers, self._writes(), [self._prefix(), self._rest(active)])

    def _joined(self, layers: range) -> Stage:
        """All rows; they see the cached prefix and the rest of the canvas."""
        return Stage(layers, self._writes(), [self._prefix(), self._rest()])

    def _writes(self) -> np.ndarray:
        slots = self.slots.copy()
        slots[self.num_active :] = -1
        return slots

    def _prefix(self) -> Read:
        return Read(self.shared, self.share.length)

    def _rest(self, rows: slice | None = None) -> Read:
        skipped = self.share.length
        return Read(self.own[skipped // self.page_size :], len(self.tokens) - skipped, rows=rows)
