"""The rows of a BiCache step (section 5.2): a shared prefix is reused in the first layers and refreshed in the others.

With depth d, exactly the layers 1 to d read the cached KV of the prefix. At a refresh, the prefix's rows enter layer d
with the states that left layer d - 1 when the prefix was encoded. Layer d still reads the cached KV, but its output
depends on the request, so layer d + 1 computes keys and values for this request. If the rows entered layer d + 1
instead, the KV of layer d + 1 would be the encoding's as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from radix import Namespace
from runtime.batch import Read, RowSet, Stage
from runtime.features.diffusion.ask import Unshared
from runtime.features.diffusion.bicache.drift import Drift
from runtime.features.diffusion.bicache.measured import ShallowMeta
from runtime.features.diffusion.canvas import BidirectionalCanvas
from runtime.features.diffusion.decoding import canvas_of
from runtime.kv.segments import slots_of
from runtime.request import Found, Request, Work


@dataclass(slots=True)
class Prefix(Found):
    """A look-up of the prefix that a request shares. `match`: the encoding in the tree; empty if the tree has none.

    Attributes:
        length: number of shared leading positions, in whole pages; 0: none.
        depth: number of layers in which the prefix is reused.
        encoding: the prefix's namespace in the tree; None without reuse.
        unshared: why no prefix is shared: reuse is `off`, `no_prefix` is known, the prefix is `too_short` for a page,
            the pool has `no_room` for it, or the depth is 0 (`no_layer`).
        meta: the record of the encoding's nodes.
        measures: whether this request measures a depth; its pages then have room for a second canvas.
    """

    length: int
    depth: int
    encoding: Namespace | None
    unshared: Unshared | None
    meta: ShallowMeta
    measures: bool


@dataclass(slots=True)
class Share:
    """The prefix that a diffusion request shares: as it asks, as it was found at the admission, and its state.

    Attributes:
        reuse: whether prefixes are shared.
        declared: number of leading prompt tokens that the request declares as shared; None: no declaration.
        wanted_depth: the depth that the request sets; None: the depth of the table.
        bound: largest mean divergence in nats of a measured depth; None: depths are not measured.
        interval: denoising steps between two refreshes of the prefix.
        drift: decides when to refresh; None: `interval` does.
        length, encoding, unshared, meta, measures: see `Prefix`.
        depth: see `Prefix`; a measurement may choose another one.
        is_encoding: whether the next step encodes the prefix alone.
        boundary: hidden states that enter layer `depth`, float32 [length, hidden]; None: not computed yet.
        refreshed_at: the number of the last denoising step that refreshed; -1: none has.
        refreshes: number of refreshes.
        divergence: measured divergence in nats of the depth in use; None: not measured.
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
    unshared: Unshared | None = None
    is_encoding: bool = False
    boundary: torch.Tensor | None = None
    refreshed_at: int = -1
    refreshes: int = 0
    meta: ShallowMeta | None = None
    measures: bool = False
    divergence: float | None = None

    def take(self, found: Prefix) -> None:
        """Take over what was found, at the admission."""
        self.length, self.depth, self.encoding, self.unshared = (
            found.length,
            found.depth,
            found.encoding,
            found.unshared,
        )
        self.meta, self.measures = found.meta, found.measures


@dataclass(frozen=True, slots=True)
class Trial:
    """A depth that the first refresh measures, by a second row set with pages of its own.

    The first row set computes the prefix in all layers. The request continues from this exact result.

    Attributes:
        depth: layers in which the prefix is reused.
        boundary: see `Share`.
        note: callback for the divergence in nats.
    """

    depth: int
    boundary: torch.Tensor | None
    note: Callable[[float], None]


@dataclass(slots=True, eq=False)
class DenoiseWork(Work):
    """A denoising step: the canvas' active rows, and others.

    Attributes:
        refresh: whether the prefix's rows are computed in the layers that do not reuse it.
        unprompted: positions that guidance computes a second time, without the prompt, in all layers.
        trial: a depth to measure.
    """

    refresh: bool = False
    unprompted: range = range(0)
    trial: Trial | None = None


def next_work(request: Request, share: Share, num_layers: int, trial: Callable[[], Trial | None]) -> DenoiseWork:
    """The next step of an admitted request. `trial`: called at the first refresh of a request that measures."""
    if share.is_encoding:
        return DenoiseWork(request, 0, share.length, share.length)
    canvas = bidirectional(request)
    active = canvas.active(share.length)
    due = share.length > 0 and _is_due(share, canvas)
    work = DenoiseWork(request, active.start, len(active), len(active))
    work.refresh = due and share.depth < num_layers
    work.unprompted = canvas.active(0) if canvas.params.cfg_scale else range(0)
    work.trial = trial() if due and share.measures and share.refreshed_at < 0 else None
    num_prefix = share.length if work.refresh or work.trial else 0
    work.num_rows += num_prefix + len(work.unprompted)
    if work.trial is not None:
        work.note = work.trial.note
        work.num_rows += len(active) + num_prefix
    return work


def bidirectional(request: Request) -> BidirectionalCanvas:
    """The canvas of a request that wants tokens."""
    canvas = canvas_of(request)
    assert isinstance(canvas, BidirectionalCanvas)
    return canvas


def _is_due(share: Share, canvas: BidirectionalCanvas) -> bool:
    """Whether this step refreshes the prefix, because of `interval` or drift.

    With a Fast-dLLM cache, only the first step of a block refreshes.
    """
    if canvas.params.cache != "none" and not canvas.is_block_start:
        return False
    if share.refreshed_at < 0:
        return True
    if share.drift is not None and share.drift.known:
        return share.drift.value > share.drift.threshold
    return canvas.num_steps - share.refreshed_at >= share.interval


def plan_rows(work: DenoiseWork, share: Share, num_layers: int, page_size: int) -> list[RowSet]:
    """The row sets of a step: the canvas or the prefix to encode, then a trial or the canvas without its prompt."""
    if share.is_encoding:
        return [_encode(work.request, share, num_layers, page_size)]
    prefix = share.length if work.refresh or work.trial else 0
    if (trial := work.trial) is not None:
        served = _denoise(work, share, num_layers, page_size, prefix, 0, None, second=True)
        return [served, _denoise(work, share, num_layers, page_size, prefix, trial.depth, trial.boundary)]
    sets = [_denoise(work, share, num_layers, page_size, prefix, share.depth, share.boundary)]
    if work.unprompted:
        sets.append(_guide(work, num_layers, page_size))
    return sets


def entry_layer(depth: int) -> int:
    """The index from 0 of the layer that the prefix's rows enter at a refresh; they enter layer 0 as embeddings."""
    return max(depth - 1, 0)


def _encode(request: Request, share: Share, num_layers: int, page_size: int) -> RowSet:
    """The prefix alone. Saves the hidden states that a refresh loads."""
    (segment,), length = request.segments, share.length
    positions = np.arange(length)
    pages = np.frombuffer(segment.pages, dtype=np.int32)
    writes, reads = slots_of(pages, positions, page_size), [Read(pages, length)]
    entry = entry_layer(share.depth)
    stages = [Stage(range(*cut), writes, reads) for cut in pairwise(sorted({0, entry, num_layers}))]
    if entry:
        stages[0].save = positions
    tokens = np.array(request.tokens[:length], dtype=np.int64)
    return RowSet(tokens, positions, stages, np.empty(0, dtype=np.int64))


def _guide(work: DenoiseWork, num_layers: int, page_size: int) -> RowSet:
    """The canvas with masks in place of its prompt, for guidance. It uses the second half of the request's pages."""
    canvas, rows = bidirectional(work.request), work.unprompted
    length, spec = len(canvas.tokens), canvas.spec
    num_own = -(-length // page_size)
    pages = np.frombuffer(work.request.sequence.pages, dtype=np.int32)[num_own:]
    positions = np.arange(rows.start, rows.stop)
    tokens = np.where(positions < canvas.prompt_len, spec.mask_token_id, canvas.tokens[positions])
    stage = Stage(range(num_layers), slots_of(pages, positions, page_size), [Read(pages, length)])
    return RowSet(tokens, positions, [stage], canvas.candidates() - spec.logits_shift - rows.start)


def _denoise(
    work: DenoiseWork,
    share: Share,
    num_layers: int,
    page_size: int,
    num_prefix: int,
    depth: int,
    boundary: torch.Tensor | None,
    second: bool = False,
) -> RowSet:
    """The active rows of a canvas, followed at a refresh by the `num_prefix` rows of the prefix.

    `second`: whether the rows use the second half of the request's pages.
    """
    request, tokens = work.request, bidirectional(work.request).tokens
    num_own, active = -(-len(tokens) // page_size), work.count
    own = np.frombuffer(request.sequence.pages, dtype=np.int32)[num_own * second :][:num_own]
    positions = np.concatenate((np.arange(work.start, work.start + active), np.arange(num_prefix)))
    slots, prefix_rows = slots_of(own, positions, page_size), np.arange(active, active + num_prefix)
    # After the reused layers, all rows read and write only the request's own pages.
    stages = [Stage(range(depth, num_layers), slots, [Read(own, len(tokens))])]
    if depth:
        (segment,) = request.segments
        prefix = Read(np.frombuffer(segment.pages, dtype=np.int32), share.length)
        rest = Read(own[share.length // page_size :], len(tokens) - share.length)
        entry = entry_layer(depth) if num_prefix else depth
        unwritten = np.concatenate((slots[:active], np.full(num_prefix, -1)))  # the tree has the prefix's KV
        joined = Stage(range(entry, depth), unwritten, [prefix, rest])
        if num_prefix and boundary is None:
            # The boundary states were evicted: compute them again, with rows of the prefix that see only the prefix.
            before = Stage(range(entry), unwritten, [prefix, replace(rest, rows=slice(0, active))], save=prefix_rows)
        else:
            alive = np.arange(active) if num_prefix else None
            before = Stage(range(entry), slots[:active], [prefix, rest], alive)
            joined.load = (prefix_rows, boundary) if entry and boundary is not None else None
        stages = [before, joined, *stages]
    wanted = request.decoding.wanted(work)
    return RowSet(tokens[positions], positions, [stage for stage in stages if stage.layers], wanted)
