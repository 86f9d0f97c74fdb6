"""The `prefix` strategy: a request reads the KV of its longest cached prefix and computes the rest."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from radix import Match, Node, path
from runtime.batch import Read, RowSet, Stage, causal_visible
from runtime.kv.misses import look_up
from runtime.kv.segments import Run, Segment
from runtime.request import A, Found, Lease, Request, Strategy, Work

# A read costs as much as about `_COST` rows. So `_MANY` segments of fewer than `_SHORT` rows become one masked read.
_MANY, _SHORT, _COST = 32, 256, 32


class PrefixLease(Lease):
    """Reads the pages in the tree that hold the KV of the request's first tokens, and computes the others.

    These pages are one segment, which grows when whole pages of the sequence are committed to the tree.
    """

    def look(self) -> Found:
        """The longest cached prefix, without the last token, whose logits the request needs."""
        if not self.cache.enabled:
            return Found(0, Match())
        most = self._most()
        while True:
            match = self.cache.tree.match(self.request.key(most), self.request.namespace)
            found = len(match.pages) * self.cache.page_size + match.partial_rows
            most, _ = self.cut(found)
            if most == found:
                return Found(found, match)

    def cut(self, place: int) -> tuple[int, int]:
        """See `GivenRows.cut`."""
        given = self.request.given
        return (place, place) if given is None else given.cut(place)

    def _together(self, start: int, most: int) -> int:
        """The number of rows behind `start` to compute if at most `most` fit: at least one, or all that see it."""
        before, end = self.cut(start + most)
        return (before if before > start else end) - start

    def reads(self) -> list[Run]:
        return [Run(self.request.tokens[: self._most()], self.request.namespace)]

    def _most(self) -> int:
        """Number of leading tokens that may be matched. Rows that give logits must be computed."""
        request = self.request
        limit = len(request.tokens) - 1
        if request.wants_prompt_logprobs:
            limit = min(limit, max((request.sampler.prompt_logprobs_from or 0) - 1, 0))
        return limit

    def peer(self, found: Found, computing: Sequence[Lease]) -> tuple[Request, int] | None:
        """A running request whose tokens share at least one more whole page with this request than the tree has."""
        request = self.request
        if not self.cache.enabled or request.wants_prompt_logprobs:
            return None
        page_size = self.cache.page_size
        start = len(found.match.pages) * page_size
        stop = start + page_size
        before, end = self.cut(stop)
        if before <= found.tokens:  # this page alone would not bring the match further
            stop = -(-end // page_size) * page_size
        for other in (lease.request for lease in computing):
            if request.namespace != other.namespace or stop > min(len(request.tokens) - 1, len(other.tokens)):
                continue
            # Compare this page first: most pairs differ there, so few pairs compare their whole prefix.
            if request.tokens[start:stop] == other.tokens[start:stop] and request.key(stop) == other.key(stop):
                return other, stop
        return None

    def admit(self, found: Found, headroom: int) -> bool:
        request = self.request
        cache, match, sequence = self.cache, found.match, request.sequence
        if request.message.explain and request.cached_tokens < 0:
            key = request.key(len(request.tokens))
            request.event.lookup = look_up(cache, key, request.namespace, self._most())
        node = cache.tree.lock_match(match)
        need = cache.pages_for(len(sequence.tokens)) - len(match.pages)
        fresh = None
        if need + headroom <= cache.num_available:
            fresh = cache.allocate(need, match.pages, request.owner)
        if fresh is None:
            cache.tree.unlock(node)
            return False
        if not request.message.idle:
            self._use(match, node)
        rows = match.partial_rows
        whole = len(match.pages) * cache.page_size
        request.read([Segment(match.pages, whole, node=node)] if node is not None else [])
        sequence.start, sequence.pages, sequence.num_computed, sequence.seconds = whole, fresh, whole + rows, 0.0
        if rows:  # valid even if `allocate` just evicted this page: nothing has overwritten it yet
            cache.pool.copy_rows(match.partial_page, fresh[0], rows)
        if request.cached_tokens < 0:
            request.cached_tokens = whole + rows
        return True

    def _use(self, match: Match, node: Node | None) -> None:
        """Count the use of the path that ends in `node`."""
        self.cache.use(node)

    def grow(self, ahead: int = 0) -> bool:
        """Allocate pages for the KV of the next token and of `ahead` more; False if the pool has too few."""
        request = self.request
        sequence = request.sequence
        rows = sequence.num_computed - sequence.start + ahead + 1
        if rows <= len(sequence.pages) * self.cache.page_size:
            return True
        missing = self.cache.pages_for(rows) - len(sequence.pages)
        behind = sequence.pages if sequence.pages or not request.segments else request.segments[0].pages
        fresh = self.cache.allocate(missing, behind, request.owner)
        if fresh is None:
            return False
        sequence.pages.extend(fresh)
        return True

    def work(self, limit: int) -> Work:
        """The request's share of the next step. `limit`: most rows; unchunkable strategies may exceed it."""
        request = self.request
        start = request.sequence.num_computed
        count = min(request.num_remaining, limit)
        if request.given is not None:
            count = self._together(start, count)
        return Work(request, start, count, count)

    def shrink(self, work: Work) -> bool:
        """Halve the rows of this step and leave the others to later steps; False if they must be computed together."""
        if work.count == 1:
            return False
        if work.draft:
            work.keep(1)
            return True
        count = self._together(work.start, work.count // 2)
        if count >= work.count:
            return False
        work.count = work.num_rows = count
        return True

    def rows(self, work: Work) -> list[RowSet]:
        """The rows of a piece of work, whose pages are allocated already."""
        request, first, stop = work.request, work.start, work.start + work.count
        sequence, stages, axes = request.sequence, self._stages(first, stop), None
        tokens = np.array(self.tokens_of(work), dtype=np.int64)
        if request.given is not None:
            stages, axes = _entered(stages, request.given.load(first, stop)), request.given.axes(first, stop)
            tokens = np.maximum(tokens, 0)  # these rows' own tokens are not in the vocabulary
        return [
            RowSet(
                tokens=tokens,
                positions=sequence.positions(first, stop),
                stages=stages,
                logits=request.decoding.wanted(work),
                axes=axes,
            )
        ]

    def tokens_of(self, work: Work) -> Sequence[int]:
        """The tokens of a piece of work; 0 while the sampled token is still on the device."""
        first, stop = work.start, work.start + work.count
        return (0,) if work.ahead else work.request.sequence.tokens[first:stop] + work.draft

    def _stages(self, first: int, stop: int) -> list[Stage]:
        page_size = self.cache.page_size
        writes = self.request.sequence.slots(first, stop, page_size)
        return [Stage(range(self.strategy.num_layers), writes, _reads(self.request, first, stop, page_size))]

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        prefills = work.prefills
        work.request.sequence.num_computed += work.count
        work.request.sequence.seconds += seconds
        if prefills:
            self._commit()
        return True

    def _commit(self) -> None:
        """Insert the full pages of the sequence into the tree; pages that the tree has already replace the own ones."""
        request = self.request
        cache, sequence = self.cache, request.sequence
        full = self._sure() // cache.page_size
        before = sequence.start // cache.page_size
        if not (cache.enabled and request.message.store) or full <= before:
            return
        own = request.segments[:1] if sequence.start else ()
        segment = own[0] if own else Segment(sequence.pages[:0], 0)
        pages = segment.pages + sequence.pages[: full - before]
        key = request.key(full * cache.page_size)
        node, held = cache.insert(key, pages, request.namespace, sequence.seconds, owner=request.owner)
        sequence.seconds = 0.0
        cache.tree.lock(node)
        cache.tree.unlock(segment.node)
        sequence.pages = sequence.pages[full - before :]
        sequence.start = full * cache.page_size
        request.read([Segment(held, sequence.start, node=node), *request.segments[len(own) :]])

    def _sure(self) -> int:
        """Number of leading tokens whose KV may be committed to the tree."""
        return self.request.sequence.num_computed

    def release(self, keep: bool) -> None:
        if keep:
            self._commit()
        self.cache.release(self.request, self.request.message.hold_s)

    def distrust(self) -> None:
        """Drop the whole paths that the request read and wrote, with all nodes below: any page may be damaged.

        This includes the page of another path from which `admit` copied the request's first own rows.
        """
        request = self.request
        read = [segment.node for segment in request.segments]
        self.cache.release(request)
        self._distrust_paths(read)
        left = self.cache.tree.match(request.key(len(request.tokens)), request.namespace)
        self._distrust_paths([left.node, left.partial_node])

    def _distrust_paths(self, nodes: Iterable[Node | None]) -> None:
        for top in [top for node in nodes for top in list(path(node))[-1:]]:
            self.cache.distrust(top)


class PrefixStrategy(Strategy[A]):
    """Exact prefix caching of causal models."""

    name = "prefix"
    keeps_prompts = True
    steady = True

    def open(self, request: Request, ask: A) -> PrefixLease:
        return PrefixLease(self, request)


def _reads(request: Request, first: int, stop: int, page_size: int) -> list[Read]:
    """Reads of all segments, and of the sequence up to each row. A single segment of whole pages joins the latter."""
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
    seen = None if request.given is None else request.given.seen(first, stop)
    visible = causal_visible(length, stop - first) if seen is None else seen - np.int32(stop - length)
    reads.append(Read(np.frombuffer(pages, dtype=np.int32), length, visible=visible))
    return reads


def _entered(stages: list[Stage], loads: Sequence[tuple[np.ndarray, torch.Tensor]]) -> list[Stage]:
    """The first stage loads states before its first layers, see `GivenRows.load`; it is cut there."""
    if not loads:
        return stages
    starts = [*range(len(loads)), stages[0].layers.stop]
    cut = [
        replace(stages[0], layers=range(*pair), load=one, adds=pair[0] > 0)
        for pair, one in zip(pairwise(starts), loads, strict=True)
    ]
    return [*cut, *stages[1:]]


def _is_short(segment: Segment, page_size: int) -> bool:
    """Whether a separate read would cost more than reading the unused rows of the segment's last page."""
    unused = -segment.length % page_size
    return segment.length < _SHORT and unused < _COST


def _read_together(segments: Sequence[Segment], page_size: int) -> Read:
    """One masked read of several segments, sorted so that requests with the same segments have the same read."""
    segments = sorted(segments, key=lambda segment: segment.pages)
    used = [segment.pages[: -(-segment.length // page_size)] for segment in segments]
    pages = np.frombuffer(b"".join(used), dtype=np.int32)
    lengths, sizes = np.array([segment.length for segment in segments]), page_size * np.array([*map(len, used)])
    keep = np.arange(sizes.sum()) < np.repeat(sizes.cumsum() - sizes + lengths, sizes)
    return Read(pages, len(keep), keep=None if keep.all() else torch.from_numpy(keep))


def _read(segment: Segment) -> Read:
    return Read(np.frombuffer(segment.pages, dtype=np.int32), segment.length)
