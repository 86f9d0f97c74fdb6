"""Entries in a request's life: found, encoded by the first request that lacks them, kept, and read."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from radix import Match, Namespace, Node
from runtime.batch import Read, RowSet, Stage
from runtime.errors import InvalidRequest
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment, slots_of
from runtime.protocol import ModelInfo
from runtime.request import Found, Request, Work
from runtime.reuse.entries.entry import Entry, EntryMeta
from runtime.reuse.prefix import PrefixStrategy

NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Encoding:
    """An entry that a request encodes.

    Attributes:
        at: the next row to encode. Rows before it lie in the tree, or in `pages` and `scratch`.
        pages: int32 page ids of the rows that are kept, those in the tree first.
        scratch: of the placeholder rows; freed when the entry is complete.
        held: what keeps these pages for the request meanwhile.
        seconds: what the rows took so far.
    """

    entry: Entry
    at: int
    pages: array[int]
    scratch: array[int]
    held: list[Segment]
    seconds: float = 0.0


@dataclass(slots=True)
class Imports:
    """A request's entries, and those that it encodes itself, one after the other.

    `computed`: the entries that were missing when the request was first admitted.
    """

    entries: list[Entry]
    encodings: list[Encoding] = field(default_factory=list)
    computed: list[Entry] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Rows that are still to be encoded."""
        return sum(len(one.entry.is_kept) - one.at for one in self.encodings)

    def parts(self, count: int) -> Iterator[tuple[Encoding, int, int]]:
        """The next `count` rows, as ranges of entries."""
        for one in self.encodings:
            first, stop = one.at, min(one.at + count, len(one.entry.is_kept))
            if first < stop:
                yield one, first, stop
            count -= stop - first


class EntryStrategy(PrefixStrategy):
    """Entries are found by their content; the first request that reads a missing one encodes it.

    An entry is encoded alone: causal among its own rows, at its own positions. Rows of placeholders go to scratch
    pages, the others side by side into whole pages, so that readers need no mask.

    A request's own tokens are cached as by `PrefixStrategy`, in a namespace of what they read. Its segments are this
    prefix, if there is one, and its entries. `request.reuse` is an `Imports`.

    The first of `counted` is the number of entries that were encoded. `kind` is what the strategy calls an entry.
    """

    kind: ClassVar[str]

    def __init__(self, cache: PagedCache, num_layers: int, model: ModelInfo):
        super().__init__(cache, num_layers)
        self._model = model

    # -- what is asked ---------------------------------------------------------------------------------------

    def _check_count(self, count: int) -> None:
        """Raise InvalidRequest for more entries than the pool has pages: each takes one."""
        if (most := self.cache.pool.num_pages) < count:
            message = f"the prompt reads {count} entries; the KV pool has {most} pages"
            raise InvalidRequest(message, param="reuse", code="context_length_exceeded")

    def _bound(self, request: Request, pages: int, most: int) -> None:
        """Set the output's limit where the request sets none.

        Args:
            request: laid out.
            pages: that it needs besides its own tokens' pages.
            most: own tokens and output that the context has room for.

        Raises:
            InvalidRequest: if the pool could never hold its pages.
        """
        pool = self.cache.pool
        if request.sampler.params.max_new_tokens is None:
            in_pool = (pool.num_pages - pages) * pool.page_size
            request.max_length = max(min(most, in_pool), request.prompt_len + 1)
        if pages + (own := self.cache.pages_for(request.max_length)) > pool.num_pages:
            raise InvalidRequest(
                f"{self.kind}s take {pages} pages of {pool.page_size} tokens, and other text and output {own} more; "
                f"the KV pool has {pool.num_pages}",
                param="prompt",
                code="context_length_exceeded",
            )

    # -- which entries exist ---------------------------------------------------------------------------------

    def find(self, request: Request) -> Found:
        """`detail`: the match of the request's own tokens, and the matches of its entries."""
        own = super().find(request)
        matches = [self._match(entry) for entry in request.reuse.entries]
        whole = sum(e.length for e, match in zip(request.reuse.entries, matches, strict=True) if self._all(e, match))
        return Found(own.tokens + whole, (own, matches))

    def reads(self, request: Request) -> list[Run]:
        """Own tokens and all entries."""
        entries = request.reuse.entries
        return [
            *super().reads(request),
            *(entry.run(self._meta(request, entry)) for entry in entries),
        ]

    def _match(self, entry: Entry) -> Match:
        if not self.cache.enabled:
            return Match()
        return self.cache.tree.match(entry.key, entry.namespace)

    def _all(self, entry: Entry, match: Match) -> bool:
        return len(match.pages) == self.cache.pages_for(entry.length)

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """One that encodes an entry which this one lacks, or that computes the same own tokens."""
        own, matches = found.detail
        if self.cache.enabled:
            pairs = zip(request.reuse.entries, matches, strict=True)
            missing = {entry.namespace for entry, match in pairs if not self._all(entry, match)}
            for other in computing:
                if any(one.entry.namespace in missing for one in other.reuse.encodings):
                    return other, 0
        return super().peer(request, own, computing)

    # -- running ---------------------------------------------------------------------------------------------

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        cache, imports = self.cache, request.reuse
        own, matches = found.detail
        pairs = list(zip(imports.entries, matches, strict=True))
        missing = [(entry, self._start(request, entry, match)) for entry, match in pairs if not self._all(entry, match)]
        kept = sum(cache.pages_for(entry.length) - start // cache.page_size for entry, start in missing)
        scratch = sum(cache.pages_for(entry.num_holes) for entry, _ in missing)
        nodes = [cache.tree.lock_match(match) for match in matches]
        is_first = request.cached_tokens < 0
        if not super().admit(request, own, headroom + kept + scratch):
            for node in nodes:
                cache.tree.unlock(node)
            return False
        fresh = cache.allocate(kept + scratch, array("i"), request.owner, cached=kept)
        assert fresh is not None, "the room was counted above"
        if is_first:
            request.cached_tokens += found.tokens - own.tokens
            imports.computed = [entry for entry, _ in missing]
        for (entry, match), node in zip(pairs, nodes, strict=True):
            cache.use(node)
            if self._all(entry, match):
                request.segments.append(Segment(match.pages, entry.length, node=node))
                self._there(request, entry, match.pages)
            else:
                fresh = self._begin(request, entry, match, node, fresh)
        return True

    def _there(self, request: Request, entry: Entry, pages: array[int]) -> None:
        """Take note of the pages of an entry that a request can read from now on."""

    def _meta(self, request: Request, entry: Entry) -> EntryMeta | None:
        """The record of an entry's run in the tree; None for an exact prefix."""
        return EntryMeta(self.kind, entry.name, entry.length) if entry.namespace.entry else None

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> EntryMeta | None:
        if not namespace.entry.startswith(f"{self.kind}:"):
            return None
        more = dict(described)
        return EntryMeta(self.kind, more.pop(self.kind), more.pop(f"{self.kind}_tokens"), more)

    def _start(self, request: Request, entry: Entry, match: Match) -> int:
        """The row at which an entry is encoded: behind its whole pages in the tree, if none of them has a hole.

        An entry that may not be kept has all its pages to itself.
        """
        if not request.message.store:
            return 0
        page_size = self.cache.page_size
        before_holes = int(entry.is_kept.argmin()) if entry.num_holes else entry.length
        return min(len(match.pages), before_holes // page_size) * page_size

    def _begin(self, request: Request, entry: Entry, match: Match, node: Node | None, fresh: array[int]) -> array[int]:
        """Let a request encode an entry, in the first of some fresh pages; returns the others."""
        start = self._start(request, entry, match)
        before = match.pages[: start // self.cache.page_size]
        kept = self.cache.pages_for(entry.length) - len(before)
        size = kept + self.cache.pages_for(entry.num_holes)
        held = [Segment(fresh[:size], 0)]
        if node is not None:
            held.append(Segment(before, 0, node=node))
        request.segments += held
        pages, scratch = before + fresh[:kept], fresh[kept:size]
        request.reuse.encodings.append(Encoding(entry, start, pages, scratch, held))
        request.sequence.pending += len(entry.is_kept) - start
        return fresh[size:]

    def work(self, request: Request, limit: int) -> Work:
        """Entries come first, as many in one step as there is room for."""
        imports = request.reuse
        if not imports.encodings:
            return super().work(request, limit)
        count = min(imports.left, limit)
        return Work(request, 0, count, count)

    def rows(self, work: Work) -> list[RowSet]:
        if not work.request.reuse.encodings:
            return super().rows(work)
        return [self._encode(*part) for part in work.request.reuse.parts(work.count)]

    def _encode(self, one: Encoding, first: int, stop: int) -> RowSet:
        """Rows of an entry: each sees those before it, kept ones and placeholders."""
        entry, page_size = one.entry, self.cache.page_size
        kept, num_kept = entry.is_kept[first:stop], entry.num_kept[first:stop]
        num_holes = np.arange(first + 1, stop + 1, dtype=np.int32) - num_kept
        writes, reads = np.empty(stop - first, dtype=np.int64), []
        for mine, pages, seen in ((kept, one.pages, num_kept), (~kept, one.scratch, num_holes)):
            writes[mine] = slots_of(pages, seen[mine].astype(np.int64) - 1, page_size)
            if seen[-1]:
                reads.append(_see(pages, seen, page_size))
        return RowSet(
            tokens=np.array(entry.sequence.tokens[first:stop], dtype=np.int64),
            positions=entry.sequence.positions(first, stop),
            stages=[Stage(range(self.num_layers), writes, reads)],
            logits=NO_ROWS,
        )

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, imports = work.request, work.request.reuse
        if not imports.encodings:
            return super().book(work, saved, seconds)
        complete = []
        for one, first, stop in imports.parts(work.count):
            one.seconds += seconds * (stop - first) / work.count
            one.at = stop
            if stop == len(one.entry.is_kept):
                complete.append(one)
        self._keep(request, complete)
        request.sequence.pending -= work.count
        return False

    def _keep(self, request: Request, complete: list[Encoding]) -> None:
        """Hand complete entries to the tree, from which the request reads them."""
        imports, known = request.reuse, set(complete)
        imports.encodings = [one for one in imports.encodings if one not in known]
        held = {id(segment) for one in complete for segment in one.held}
        segments = [segment for segment in request.segments if id(segment) not in held]
        request.segments = segments + [self._insert(request, one) for one in complete]
        self.counters[self.counted[0]] += len(complete)

    def _insert(self, request: Request, one: Encoding) -> Segment:
        """The segment of a complete entry; its pages stay private where nothing may be kept."""
        cache, entry = self.cache, one.entry
        cache.allocator.release(one.scratch)
        node, pages = None, one.pages
        if cache.enabled and request.message.store:
            meta = self._meta(request, entry)
            node, pages = cache.insert(entry.key, pages, entry.namespace, one.seconds, meta, request.owner)
            cache.tree.lock(node)
        for segment in one.held:
            cache.tree.unlock(segment.node)
        self._there(request, entry, pages)
        return Segment(pages, entry.length, node=node)

    def release(self, request: Request, keep: bool) -> None:
        super().release(request, keep)
        request.reuse.encodings = []

    @abstractmethod
    def _describe(self, request: Request) -> dict[str, Any]:
        """The strategy's own fields of a report."""

    def report(self, request: Request) -> dict[str, Any] | None:
        """With the first token: nothing of it changes later."""
        if request.num_output > 1:
            return None
        reused = max(request.cached_tokens, 0)
        counts = {"reused_tokens": reused, "computed_tokens": request.num_prompt - reused}
        return {"strategy": self.name, **self._describe(request), **counts}


def _see(pages: array[int], seen: np.ndarray, page_size: int) -> Read:
    """A read of the first rows of some pages; `seen`: int32 [n], ascending, how many of them each row sees."""
    length, blind = int(seen[-1]), int(np.searchsorted(seen, 1))
    table = np.frombuffer(pages, dtype=np.int32)[: -(-length // page_size)]
    visible = seen[blind:] if len(seen) - blind > 1 else None
    return Read(table, length, visible=visible, rows=slice(blind, None) if blind else None)
