"""Combines the row sets of many requests, under any reuse strategies, into one ForwardBatch."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import torch

from radix.node import TOKEN_BYTES, common_tokens
from runtime.batch import (
    AdapterRows,
    AttentionPlan,
    ForwardBatch,
    HiddenRows,
    LayerGroup,
    Read,
    RowSet,
    Span,
    Stage,
    StateRows,
)

_BLOCK = 64  # tokens that the CPU kernels sum as one block (`kKeys`)


@dataclass(slots=True)
class Plan:
    """A step, and where each row set finds its results. Both lists have the order of the given row sets.

    Attributes:
        logits: the row set's rows of the step's logits.
        saved: float32 [n, hidden], the saved states of its stages in order, which the step fills; None: it saves none.
    """

    batch: ForwardBatch
    logits: list[slice]
    saved: list[torch.Tensor | None]


@dataclass(slots=True)
class _Member:
    """The stage of a row set in one layer group, where its alive rows are rows `first` to `stop` (exclusive)."""

    stage: Stage
    first: int
    stop: int

    def rows(self, read: Read) -> slice:
        if read.rows is None:
            return slice(self.first, self.stop)
        start, stop, _ = read.rows.indices(self.stop - self.first)
        return slice(self.first + start, self.first + stop)


def build(
    sets: Sequence[RowSet],
    num_layers: int,
    page_size: int,
    hidden_size: int = 0,
    device: torch.device | None = None,
    least_saved_tokens: int = 256,
) -> Plan:
    """Plan one step over row sets. The arguments are not changed.

    If several sets read the same leading pages, one edge reads these pages for the rows of all of them (tree
    attention), whatever the position of the read in each set.

    Args:
        sets: at least one. They are sorted by adapter and then by their first read, so that equal ones are neighbours.
        num_layers: layers of the model.
        page_size: tokens in a page.
        hidden_size, device: of the hidden states that stages save.
        least_saved_tokens: see `stretches`.
    """
    order = sorted(range(len(sets)), key=lambda i: (sets[i].adapter, _first_table(sets[i])))
    starts, logits = [0] * len(sets), [slice(0)] * len(sets)
    logits_rows: list[int] = []
    total = 0
    for i in order:
        one = sets[i]
        starts[i], logits[i] = total, slice(len(logits_rows), len(logits_rows) + len(one.logits))
        logits_rows += [total + row for row in one.logits.tolist()]
        total += len(one.tokens)
    cuts = sorted({stage.layers.start for one in sets for stage in one.stages} | {num_layers})
    ordered = [(sets[i], starts[i]) for i in order]
    every = [_group(ordered, range(*cut), total, page_size, least_saved_tokens) for cut in pairwise(cuts)]
    groups = [group for group in every if len(group.kv_write)]
    saved = [_carry(one, start, groups, hidden_size, device) for one, start in zip(sets, starts, strict=True)]
    batch = ForwardBatch(
        tokens=torch.from_numpy(np.concatenate([one.tokens for one, _ in ordered])),
        positions=torch.from_numpy(np.concatenate([one.positions for one, _ in ordered])),
        groups=groups,
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        adapters=_adapters(ordered) if any(one.adapter for one in sets) else [],
        axes=_axes(ordered) if any(one.axes is not None for one in sets) else None,
        states=[_state_rows(one.state, start) for one, start in ordered if one.state is not None],
    )
    return Plan(batch, logits, saved)


def _axes(ordered: Sequence[tuple[RowSet, int]]) -> torch.Tensor:
    every = (one.positions[:, None].repeat(3, 1) if one.axes is None else one.axes for one, _ in ordered)
    return torch.from_numpy(np.concatenate([*every]))


def _adapters(ordered: Sequence[tuple[RowSet, int]]) -> list[AdapterRows]:
    found = []
    for digest, several in groupby(ordered, key=lambda pair: pair[0].adapter):
        (_, first), *_ = members = list(several)
        last, start = members[-1]
        found.append(AdapterRows(digest, first, start + len(last.tokens)))
    return [rows for rows in found if rows.digest]


def _state_rows(one: StateRows, start: int) -> StateRows:
    saves = [(start + row, slot) for row, slot in one.saves]
    return StateRows(start + one.first, start + one.stop, one.slot, one.target, saves, one.draft, one.accepted)


def _first_table(one: RowSet) -> bytes:
    reads = one.stages[0].reads
    return reads[0].pages.tobytes() if reads else b""


def _stage_at(one: RowSet, layer: int) -> Stage:
    stages = one.stages
    return stages[0] if len(stages) == 1 else next(stage for stage in stages if layer in stage.layers)


def _group(
    ordered: Sequence[tuple[RowSet, int]], layers: range, total: int, page_size: int, least_saved_tokens: int
) -> LayerGroup:
    members: list[_Member] = []
    rows = 0
    for one, _ in ordered:
        stage = _stage_at(one, layers.start)
        members.append(_Member(stage, rows, rows + len(stage.writes)))
        rows = members[-1].stop
    return LayerGroup(
        layers=layers,
        rows=None if rows == total else torch.from_numpy(_alive(ordered, members)),
        kv_write=torch.from_numpy(np.concatenate([member.stage.writes for member in members])),
        attention=_attend(members, rows, page_size, least_saved_tokens),
    )


def _alive(ordered: Sequence[tuple[RowSet, int]], members: Sequence[_Member]) -> np.ndarray:
    """The flat rows that are computed in a layer group."""
    every = (
        np.arange(len(one.tokens)) if m.stage.alive is None else m.stage.alive
        for (one, _), m in zip(ordered, members, strict=True)
    )
    return np.concatenate([start + rows for (_, start), rows in zip(ordered, every, strict=True)])


def _attend(members: Sequence[_Member], num_rows: int, page_size: int, least_saved_tokens: int) -> AttentionPlan:
    plan = AttentionPlan(num_rows)
    alone: list[list[Read]] = [[] for _ in members]
    by_shift: dict[int, list[tuple[bytes, int, Read]]] = defaultdict(list)
    masked: dict[tuple[int, bytes, bytes], list[tuple[int, Read]]] = defaultdict(list)
    for m, member in enumerate(members):
        for read in member.stage.reads:
            if read.keep is not None and read.visible is None:
                masked[read.shift, read.pages.tobytes(), read.keep.numpy().tobytes()].append((m, read))
            else:
                by_shift[read.shift].append((_shareable(read, page_size), m, read))
    for equal in masked.values():
        read = equal[0][1]
        rows = _union([members[m].rows(other) for m, other in equal])
        plan.add(rows, Span(read.pages, read.length, read.shift, read.keep))
    for shift, entries in by_shift.items():
        entries.sort(key=itemgetter(0))
        for found in stretches([table for table, _, _ in entries], page_size, least_saved_tokens):
            sharing = entries[found.first : found.last]
            _, m, read = sharing[0]
            if len(sharing) == 1:
                alone[m] += _rest(read, found.start, page_size)
            else:
                pages = read.pages[found.start : found.stop]
                rows = _union([members[i].rows(other) for _, i, other in sharing])
                length = min(found.stop * page_size, read.length) - found.start * page_size
                plan.add(rows, Span(pages, length, shift, position=read.position + found.start * page_size))
    for member, reads in zip(members, alone, strict=True):
        for read in reads if len(reads) == 1 else _merge(reads, page_size):
            span = Span(read.pages, read.length, read.shift, read.keep, read.position)
            plan.add(member.rows(read), span, read.visible)
    return plan


def _shareable(read: Read, page_size: int) -> bytes:
    """The leading int32 page ids that every row of a read sees, as bytes. A partly used last page gets an id < 0."""
    if read.keep is not None:
        return b""
    if read.visible is not None:
        return read.pages[: int(read.visible.min()) // page_size].tobytes()
    whole, rest = divmod(read.length, page_size)
    if not rest:
        return read.pages.tobytes()
    slot = int(read.pages[whole]) * page_size + rest
    return read.pages[:whole].tobytes() + (-slot).to_bytes(TOKEN_BYTES, "little", signed=True)


def _union(ranges: Sequence[slice]) -> slice | torch.Tensor:
    """The rows of several ranges, int64; a slice if the ranges are adjacent."""
    ranges = sorted(ranges, key=lambda rows: rows.start)
    if all(a.stop == b.start for a, b in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.from_numpy(np.concatenate([np.arange(rows.start, rows.stop) for rows in ranges]))


def _rest(read: Read, start: int, page_size: int) -> list[Read]:
    """A read without its first `start` pages, which a shared edge reads; empty if nothing is left."""
    if not start:
        return [read]
    rows = start * page_size
    if rows >= read.length:
        return []
    visible = None if read.visible is None else read.visible - rows
    # A read with `keep` shares no pages, so `rest` has no mask.
    rest = Read(read.pages[start:], read.length - rows, read.shift, None, visible, read.rows, read.position + rows)
    return [rest]


def _merge(reads: Sequence[Read], page_size: int) -> list[Read]:
    """Merge reads by the same rows: all whole pages with one shift become one read, or the start of another read.

    Attention does not depend on the order of pages.
    """
    merged: list[Read] = []
    whole: dict[int, list[np.ndarray]] = defaultdict(list)
    for read in reads:
        if read.visible is None and read.keep is None and read.rows is None and read.length % page_size == 0:
            whole[read.shift].append(read.pages)
        else:
            merged.append(read)
    for shift, tables in whole.items():
        pages = np.concatenate(tables)
        length = len(pages) * page_size
        fits = (i for i, r in enumerate(merged) if r.shift == shift and r.keep is None and r.rows is None)
        if (i := next(fits, None)) is None:
            merged.append(Read(pages, length, shift))
        else:
            visible = merged[i].visible
            visible = None if visible is None else visible + np.int32(length)
            merged[i] = Read(np.concatenate((pages, merged[i].pages)), length + merged[i].length, shift, None, visible)
    return merged


def _carry(
    one: RowSet, start: int, groups: Sequence[LayerGroup], hidden_size: int, device: torch.device | None
) -> torch.Tensor | None:
    """Add a row set's loaded and saved states to the layer groups; returns the tensor that the step fills."""
    for stage in one.stages:
        if stage.load is not None:
            rows, states = stage.load
            group = next(g for g in groups if g.layers.start == stage.layers.start)
            group.load.append(HiddenRows(torch.from_numpy(start + rows), states))
    wanted = [(stage.layers.stop, stage.save) for stage in one.stages if stage.save is not None]
    if not wanted:
        return None
    saved = torch.empty(sum(len(rows) for _, rows in wanted), hidden_size, device=device)
    for (stop, rows), states in zip(wanted, saved.split([len(rows) for _, rows in wanted]), strict=True):
        group = next(g for g in groups if g.layers.stop == stop)
        group.save.append(HiddenRows(torch.from_numpy(start + rows), states))
    return saved


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pages `start` to `stop` (exclusive), which are the same in the page tables `first` to `last` (exclusive)."""

    first: int
    last: int
    start: int
    stop: int


def stretches(tables: Sequence[bytes], page_size: int, least_saved_tokens: int = 256) -> list[Stretch]:
    """Cut sorted page tables into shared stretches that are worth reading once, and the rest of each table.

    Equal page ids show what requests share, so the tree is not needed. A shared stretch ends at a multiple of the key
    blocks that the CPU kernels sum, or with a partly used page, behind which no row goes on. Where all tables end with
    a whole page, their rows may go on. So the sums of a row are equal to the bit, whichever requests share the stretch.

    Args:
        tables: int32 page ids as bytes, in ascending order of these bytes.
        page_size: tokens in a page.
        least_saved_tokens: token reads that a shared stretch must save at least. Below, merging the partial results of
            one more edge costs more than the reads.

    Returns:
        Stretches that cover every table exactly once. The last stretch of each table is unshared and may be empty.
    """
    unit = _BLOCK // math.gcd(_BLOCK, page_size)
    found: list[Stretch] = []
    pending = [(0, len(tables), 0, 0)] if tables else []
    while pending:
        first, last, start, at = pending.pop()
        if last - first == 1:
            found.append(Stretch(first, last, start, len(tables[first]) // TOKEN_BYTES))
            continue
        # The first and the last of sorted tables share the least.
        shared = at + common_tokens(tables[first], at * TOKEN_BYTES, tables[last - 1][at * TOKEN_BYTES :])
        all_equal = len(tables[first]) == len(tables[last - 1]) == shared * TOKEN_BYTES
        ends = all_equal and shared > at and tables[first][-1] >= 128  # the sign of the last id
        whole = shared if ends else shared // unit * unit
        if (whole - start) * page_size * (last - first - 1) >= least_saved_tokens:
            found.append(Stretch(first, last, start, whole))
            start = whole
        parting = slice(shared * TOKEN_BYTES, (shared + 1) * TOKEN_BYTES)
        for page, group in groupby(range(first, last), key=lambda i: tables[i][parting]):
            members = list(group)
            if page:
                pending.append((members[0], members[-1] + 1, start, shared))
            else:  # equal tables that end here: each still gets a last stretch of its own
                pending.extend((i, i + 1, start, shared) for i in members)
    return found
