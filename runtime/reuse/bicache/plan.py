"""The rows of a BiCache step (section 5.2): a shared prefix exists in the first layers, the others are refreshed.

With depth d, layers 1 to d read the KV that was computed for the prefix alone, and no other layer does. At a refresh
the prefix's rows join before layer d, with the states they left layer d - 1 with when the prefix was encoded: layer d
still reads the cached KV, but its output has seen the request, so layer d + 1 projects keys and values of this request.
Joining after layer d would reuse layer d + 1 as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from radix import Namespace
from runtime.batch import Read, RowSet, Stage
from runtime.diffusion.canvas import BidirectionalCanvas
from runtime.kv.segments import slots_of
from runtime.request import Request, Work
from runtime.reuse.bicache.drift import Drift
from runtime.reuse.bicache.shallow_meta import ShallowMeta


@dataclass(slots=True)
class Share:
    """The prefix that a diffusion request shares; looked up anew while the request waits.

    Attributes:
        reuse: whether prefixes are shared.
        declared: leading prompt tokens that requests share, as the request says; None: it does not say.
        wanted_depth: layers in which the prefix is to be reused; None: as the table says.
        bound: most divergence in nats that measured depths may bring; None: nothing is measured.
        interval: denoising steps between two refreshes of the prefix.
        drift: decides on refreshes in place of the interval; None: the interval does.
        length: shared leading positions, whole pages; 0: none.
        depth: layers in which they are reused.
        encoding: the prefix's namespace in the tree; None without reuse.
        unshared: why there is none: reuse is `off`, `no_prefix` is known, it is `too_short` for a page, there is
            `no_room` for it, or `no_layer` is to be reused.
        is_encoding: whether the next step encodes the prefix alone.
        boundary: states with which the prefix enters layer `depth`, float32 [length, hidden], once they are known.
        refreshed_at: the number of the last denoising step that refreshed; -1: none has.
        refreshes: number of refreshes.
        meta: the record of the encoding's nodes.
        measures: whether this request measures a depth, for which it has pages for a second canvas.
        divergence: nats, of the measured depth with which this request was served.
    """

    reuse: bool = True
    declared: int | None = None
    wanted_depth: int | None = None
    bound: float | None = None
    interval: int = 1
    drift: Drift | None = None
    length: int = 0
    depth: int = 0
    encoding: Namespace | None = None
    unshared: str | None = None
    is_encoding: bool = False
    boundary: torch.Tensor | None = None
    refreshed_at: int = -1
    refreshes: int = 0
    meta: ShallowMeta | None = None
    measures: bool = False
    divergence: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A depth whose outputs the first refresh compares with its own: a second row set of the step, on its own pages.

    The request is served from the exact row set, which computes the prefix in all layers.

    Attributes:
        depth: layers in which the prefix is reused.
        boundary: see `Share`.
        note: takes the divergence in nats.
    """

    depth: int
    boundary: torch.Tensor | None
    note: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class DenoiseRows:
    """The rows of a denoising step beside its active ones.

    Attributes:
        refresh: whether the prefix's rows are computed in the layers in which it is not reused.
        unprompted: positions that are computed once more without the prompt, in all layers, for guidance.
    """

    refresh: bool = False
    unprompted: range = range(0)
    trial: Trial | None = None


def next_work(request: Request, num_layers: int, trial: Callable[[], Trial | None]) -> Work:
    """The next step of a request that has all its pages; `trial`: the depth that its first refresh measures, if any."""
    share, canvas = request.reuse, request.canvas
    if share.is_encoding:
        return Work(request, 0, share.length, share.length, detail=DenoiseRows())
    active = canvas.active(share.length)
    due = share.length > 0 and _is_due(share, canvas)
    rows = DenoiseRows(
        refresh=due and share.depth < num_layers,
        unprompted=canvas.active(0) if canvas.params.cfg_scale else range(0),
        trial=trial() if due and share.measures and share.refreshed_at < 0 else None,
    )
    num_prefix = share.length if rows.refresh or rows.trial else 0
    num_rows = len(active) + num_prefix + len(rows.unprompted)
    if rows.trial is not None:
        num_rows += len(active) + num_prefix
    return Work(request, active.start, len(active), num_rows, detail=rows)


def _is_due(share: Share, canvas: BidirectionalCanvas) -> bool:
    """Whether the prefix is refreshed: after `interval` steps or for its drift.

    With a Fast-dLLM cache, only at a block's beginning.
    """
    if canvas.params.cache != "none" and not canvas.is_block_start:
        return False
    if share.refreshed_at < 0:
        return True
    if share.drift is not None and share.drift.known:
        return share.drift.is_due
    return canvas.num_steps - share.refreshed_at >= share.interval


def plan_rows(work: Work, num_layers: int, page_size: int) -> list[RowSet]:
    """The row sets of a step: the canvas (or the prefix, while it is encoded), and the canvas without its prompt."""
    share, rows = work.request.reuse, work.detail
    if share.is_encoding:
        return [_encode(work.request, num_layers, page_size)]
    prefix = share.length if rows.refresh or rows.trial else 0
    if (trial := rows.trial) is not None:
        served = _CanvasRows(work, page_size, prefix, 0, None, second=True)
        tried = _CanvasRows(work, page_size, prefix, trial.depth, trial.boundary)
        return [served.row_set(num_layers), tried.row_set(num_layers)]
    sets = [_CanvasRows(work, page_size, prefix, share.depth, share.boundary).row_set(num_layers)]
    if rows.unprompted:
        sets.append(_guide(work, num_layers, page_size))
    return sets


def entry_layer(depth: int) -> int:
    """The index of the layer before which the prefix's rows join; at 0 they join as embeddings."""
    return max(depth - 1, 0)


def _encode(request: Request, num_layers: int, page_size: int) -> RowSet:
    """The prefix alone; the states with which it leaves the layer before its entry are saved."""
    (segment,), length = request.segments, request.reuse.length
    positions = np.arange(length)
    pages = np.frombuffer(segment.pages, dtype=np.int32)
    writes, reads = slots_of(pages, positions, page_size), [Read(pages, length)]
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
    stage = Stage(range(num_layers), slots_of(pages, positions, page_size), [Read(pages, length)])
    return RowSet(tokens, positions, [stage], canvas.candidates() - spec.logits_shift - rows.start)


class _CanvasRows:
    """The rows of a canvas: first its active ones, then, at a refresh, the `num_prefix` of the prefix.

    `second`: on the second half of the request's pages.
    """

    def __init__(
        self,
        work: Work,
        page_size: int,
        num_prefix: int,
        depth: int,
        boundary: torch.Tensor | None,
        second: bool = False,
    ):
        request = work.request
        self.work, self.page_size = work, page_size
        self.num_prefix, self.depth, self.boundary = num_prefix, depth, boundary
        self.share: Share = request.reuse
        self.tokens = request.canvas.tokens
        num_own = -(-len(self.tokens) // page_size)
        self.own = np.frombuffer(request.sequence.pages, dtype=np.int32)[num_own * second :][:num_own]
        shared = request.segments[0].pages if request.segments else request.sequence.pages[:0]
        self.shared = np.frombuffer(shared, dtype=np.int32)
        self.num_active = work.count
        active = np.arange(work.start, work.start + work.count)
        self.positions = np.concatenate((active, np.arange(self.num_prefix)))
        self.slots = slots_of(self.own, self.positions, page_size)
        self.prefix_rows = np.arange(self.num_active, self.num_active + self.num_prefix)

    def row_set(self, num_layers: int) -> RowSet:
        depth, boundary = self.depth, self.boundary
        if not self.share.length:
            stages = [self._full(range(num_layers))]
        elif not self.num_prefix:
            stages = [self._without_prefix(range(depth)), self._full(range(depth, num_layers))]
        else:
            entry = entry_layer(depth)
            before = self._apart(range(entry)) if boundary is None else self._without_prefix(range(entry))
            joined, deep = self._joined(range(entry, depth)), self._full(range(depth, num_layers))
            if boundary is not None and entry:
                joined.load = self.prefix_rows, boundary
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
