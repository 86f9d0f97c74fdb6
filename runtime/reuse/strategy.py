"""The interface of a reuse strategy, and how a sequence is computed in order behind the segments that it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch

from radix import Namespace
from radix.node import Meta
from runtime.batch import causal_visible
from runtime.kv.cache import PagedCache
from runtime.request import Request, Run, Segment, Work
from runtime.reuse.build import Read, RowSet, Stage

# So many segments of fewer rows are read together, where this leaves fewer rows unused than a read of its own costs.
_MANY, _SHORT, _COST = 32, 256, 32


@dataclass(slots=True)
class Found:
    """KV that exists for a waiting request.

    Attributes:
        tokens: prompt tokens that need not be computed.
        detail: what the strategy wants to know at admission.
    """

    tokens: int = 0
    detail: Any = None


class Strategy(ABC):
    """Decides what requests read, what they compute, and what is kept of it.

    A strategy that computes the sequence in order, each row behind all segments and all rows before it, defines
    `find`, `admit` and `release`; the other methods serve it as they are.

    Attributes:
        name: the `method` by which a request asks for it.
        takes_turns: whether the rows of a request's step see each other, so that a step cannot be cut into chunks.
            Such requests take turns; the others are prefilled in the order of their admission.
        steady: whether what a row of a decoding request reads is what the row before it read, and that row.
        keeps_prompts: whether the KV of a computed prompt lies in the tree under the prompt's own tokens.
        counted, counters: names and values of the strategy's own counters.
    """

    name: ClassVar[str]
    keeps_prompts: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = False
    steady: ClassVar[bool] = False
    counted: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cache: PagedCache, num_layers: int):
        self.cache = cache
        self.num_layers = num_layers
        self.counters = dict.fromkeys(self.counted, 0)

    def open(self, request: Request, asked: dict[str, Any]) -> None:  # noqa: B027 - most strategies need no state
        """Take a new request: lay out its sequence, and refuse what cannot be served.

        Args:
            request: new; waits next.
            asked: the `reuse` fields of its message.

        Raises:
            InvalidRequest: for fields that do not fit.
        """

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        """The runs of the tree in which the KV of a prompt lies, once it is computed.

        Args:
            tokens: int32, the prompt's whole pages.
            namespace: of its requests.
            asked: as of `open`.

        Raises:
            InvalidRequest: for fields that do not fit.
        """
        return [Run(tokens, namespace)]

    def reads(self, request: Request) -> list[Run]:
        """The runs that a waiting request would read, where they exist. A tier may have what the tree lacks."""
        return []

    def restored(self, tokens: array[int], namespace: Namespace) -> None:  # noqa: B027
        """Take note of a run of which all or some has come into the tree from a tier."""

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> Meta | None:
        """The record of an entry of this strategy, from how it described itself; None if it is none."""
        return None

    @abstractmethod
    def find(self, request: Request) -> Found:
        """Look up what exists for a waiting request. Reads only."""

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """The running request that computes now what this one would compute, too, and when it will be there.

        `computing` are requests of this strategy that prefill.

        Returns:
            One of `computing`, and the number of its tokens that must be computed before this request is looked up
            again; None to admit this request now.
        """
        return None

    @abstractmethod
    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        """Lock the segments of a waiting request and allocate pages for its sequence.

        Args:
            request: reads nothing yet.
            found: a fresh `find` of it.
            headroom: pages that must stay available for requests that decode.

        Returns:
            False, with nothing changed, if memory does not suffice.
        """

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
        """The request's share of the next step; `limit`: most rows, which requests that take turns may exceed."""
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
        """The tokens of a piece of work; one that nobody has read yet is left 0."""
        first, stop = work.start, work.start + work.count
        return (0,) if work.ahead else work.request.sequence.tokens[first:stop] + work.draft

    def _stages(self, request: Request, first: int, stop: int) -> list[Stage]:
        page_size = self.cache.page_size
        writes = request.sequence.slots(first, stop, page_size)
        partly = [segment.layers for segment in request.segments if segment.layers is not None]
        if not partly:
            reads = _reads(request, request.segments, first, stop, page_size)
            return [Stage(range(self.num_layers), writes, reads)]
        cuts = {0, self.num_layers, *(layers.start for layers in partly), *(layers.stop for layers in partly)}
        stages = []
        for cut in pairwise(sorted(cuts)):
            layers = range(*cut)
            valid = [s for s in request.segments if s.layers is None or layers.start in s.layers]
            stages.append(Stage(layers, writes, _reads(request, valid, first, stop, page_size)))
        return stages

    @abstractmethod
    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        """Book rows that were computed.

        Args:
            work: what was computed.
            saved: states that its row sets saved.
            seconds: what the rows took.

        Returns:
            Whether the work's logits go to the decoding.
        """

    @abstractmethod
    def release(self, request: Request, keep: bool) -> None:
        """Take all pages and segments from a running request; with `keep`, computed rows stay cached."""

    def distrust(self, request: Request) -> None:  # noqa: B027
        """Drop from the cache what a request read or left there, before it is released: its logits were no numbers."""

    def flush(self) -> None:  # noqa: B027
        """Drop what the strategy keeps beside the tree, as the cache is flushed."""

    def figures(self) -> dict[str, float]:
        """Figures of its own besides counters, for operators."""
        return {}

    def phase(self, request: Request) -> str:
        """The phase of a running request, for people."""
        return "decode" if request.num_output else "prefill"

    def report(self, request: Request) -> dict[str, Any] | None:
        """The `reuse` field of the request's next event; None: it has nothing new to say."""
        return None


def _reads(request: Request, segments: Sequence[Segment], first: int, stop: int, page_size: int) -> list[Read]:
    """All of the segments, and of the sequence what lies before each row; one read where that is one run of rows."""
    sequence = request.sequence
    own = sequence.pages[: -(-(stop - sequence.start) // page_size)]
    length = stop - sequence.start
    only = segments[0] if len(segments) == 1 else None
    if only is not None and not only.shift and only.keep is None and only.length % page_size == 0:
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
    return segment.length < _SHORT and unused < _COST and not segment.shift and segment.keep is None


def _read_together(segments: Sequence[Segment], page_size: int) -> Read:
    """One read of several segments, the same for all requests that read the same ones."""
    segments = sorted(segments, key=lambda segment: segment.pages)
    used = [segment.pages[: -(-segment.length // page_size)] for segment in segments]
    pages = np.frombuffer(b"".join(used), dtype=np.int32)
    lengths, sizes = np.array([segment.length for segment in segments]), page_size * np.array([*map(len, used)])
    keep = np.arange(sizes.sum()) < np.repeat(sizes.cumsum() - sizes + lengths, sizes)
    return Read(pages, len(keep), keep=None if keep.all() else torch.from_numpy(keep))


def _read(segment: Segment) -> Read:
    return Read(np.frombuffer(segment.pages, dtype=np.int32), segment.length, segment.shift, segment.keep)
