"""The sequence computed in order: each row behind all segments and all rows before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from runtime.batch import Read, RowSet, Stage, causal_visible
from runtime.kv.segments import Segment
from runtime.request import Request, Strategy, Work

# Segments of fewer than `_SHORT` rows are read together if there are `_MANY` of them and few unused rows are read.
_MANY, _SHORT, _COST = 32, 256, 32


class InOrder(Strategy):
    """Computes the sequence in order; a subclass says which segments exist, and what is kept."""

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """Make room for the next token's KV, and for `ahead` more; False if memory does not suffice."""
        sequence = request.sequence
        rows = sequence.num_computed - sequence.start + ahead + 1
        if rows <= len(sequence.pages) * self.cache.page_size:
            return True
        missing = self.cache.pages_for(rows) - len(sequence.pages)
        fresh = self.cache.allocate(missing, self._behind(request), request.owner)
        if fresh is None:
            return False
        sequence.pages.extend(fresh)
        return True

    def _behind(self, request: Request) -> Any:
        """The pages that new ones would best follow."""
        if request.sequence.pages or not request.segments:
            return request.sequence.pages
        return request.segments[0].pages

    def work(self, request: Request, limit: int) -> Work:
        """The request's share of the next step; `limit`: most rows, which unchunkable requests may exceed."""
        start = request.sequence.num_computed
        count = min(request.num_remaining, limit)
        return Work(request, start, count, count)

    def shrink(self, work: Work) -> bool:
        """Leave half of the rows to later steps; False if that cannot be."""
        if work.count == 1:
            return False
        if work.draft:
            work.keep(1)
        else:
            work.count //= 2
        work.num_rows = work.count
        return True

    def rows(self, work: Work) -> list[RowSet]:
        """The rows of a piece of work; their pages are allocated."""
        request, first, stop = work.request, work.start, work.start + work.count
        sequence = request.sequence
        return [
            RowSet(
                tokens=np.array(self.tokens_of(work), dtype=np.int64),
                positions=sequence.positions(first, stop),
                stages=self._stages(request, first, stop),
                logits=request.decoding.wanted(work),
            )
        ]

    def tokens_of(self, work: Work) -> Sequence[int]:
        """The tokens of a piece of work; 0 while the sampled token is still on the device."""
        first, stop = work.start, work.start + work.count
        return (0,) if work.ahead else work.request.sequence.tokens[first:stop] + work.draft

    def _stages(self, request: Request, first: int, stop: int) -> list[Stage]:
        page_size = self.cache.page_size
        writes = request.sequence.slots(first, stop, page_size)
        return [Stage(range(self.num_layers), writes, _reads(request, first, stop, page_size))]


def _reads(request: Request, first: int, stop: int, page_size: int) -> list[Read]:
    """All of the segments, and of the sequence what lies before each row; one read where that is one run of rows."""
    segments, sequence = request.segments, request.sequence
    own = sequence.pages[: -(-(stop - sequence.start) // page_size)]
    length = stop - sequence.start
    only = segments[0] if len(segments) == 1 else None
    if only is not None and only.length % page_size == 0:
        pages, length = only.pages + own, only.length + length
        reads = []
    else:
        pages = own
        short = [segment for segment in segments if _is_short(segment, page_size)]
        if len(short) < _MANY:
            reads = [_read(segment) for segment in segments]
        else:
            reads = [_read(segment) for segment in segments if not _is_short(segment, page_size)]
            reads.append(_read_together(short, page_size))
    visible = causal_visible(length, stop - first)
    reads.append(Read(np.frombuffer(pages, dtype=np.int32), length, visible=visible))
    return reads


def _is_short(segment: Segment, page_size: int) -> bool:
    """Whether a read of its own costs more than the unused rows of its last page do."""
    unused = -segment.length % page_size
    return segment.length < _SHORT and unused < _COST


def _read_together(segments: Sequence[Segment], page_size: int) -> Read:
    """One read of several segments, the same for all requests that read the same ones."""
    segments = sorted(segments, key=lambda segment: segment.pages)
    used = [segment.pages[: -(-segment.length // page_size)] for segment in segments]
    pages = np.frombuffer(b"".join(used), dtype=np.int32)
    lengths, sizes = np.array([segment.length for segment in segments]), page_size * np.array([*map(len, used)])
    keep = np.arange(sizes.sum()) < np.repeat(sizes.cumsum() - sizes + lengths, sizes)
    return Read(pages, len(keep), keep=None if keep.all() else torch.from_numpy(keep))


def _read(segment: Segment) -> Read:
    return Read(np.frombuffer(segment.pages, dtype=np.int32), segment.length)
