"""The base of strategies with entries: looks entries up, lets a request encode missing ones, keeps and reads them."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Never

import msgspec
import numpy as np
import torch

from radix import Match, Namespace, Node
from radix.node import TOKEN_BYTES
from runtime.asks import ReuseReport
from runtime.batch import Read, RowSet, Stage
from runtime.errors import InvalidRequest
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment, slots_of
from runtime.protocol import ModelInfo
from runtime.request import A, Found, Lease, Request, Work
from runtime.reuse.entries.entry import Entry, EntryMeta
from runtime.reuse.prefix import PrefixLease, PrefixStrategy

NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Encoding:
    """An entry that a request is encoding.

    Attributes:
        at: index of the next row to encode; the rows before it have KV in `pages` and `scratch`.
        pages: int32 page ids of the kept rows; pages that the tree had already come first.
        scratch: int32 page ids of the placeholder rows, freed when the entry is complete.
        held: segments that keep these pages allocated or locked during the encoding.
        seconds: compute time so far.
    """

    entry: Entry
    at: int
    pages: array[int]
    scratch: array[int]
    held: list[Segment]
    seconds: float = 0.0


@dataclass(slots=True)
class Imports:
    """A request's entries. `encodings`: the entries that it encodes itself, in order.

    `computed`: the entries that were missing when the request was first admitted.
    """

    entries: list[Entry]
    encodings: list[Encoding] = field(default_factory=list)
    computed: list[Entry] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of rows that still have to be encoded."""
        return sum(len(one.entry.is_kept) - one.at for one in self.encodings)

    def parts(self, count: int) -> Iterator[tuple[Encoding, int, int]]:
        """The next `count` rows to encode, as (encoding, start, stop) with indices of the entry's rows."""
        for one in self.encodings:
            first, stop = one.at, min(one.at + count, len(one.entry.is_kept))
            if first < stop:
                yield one, first, stop
            count -= stop - first


@dataclass(slots=True)
class EntriesFound(Found):
    """A look-up of a prompt with entries.

    Attributes:
        own_tokens: of `tokens`, those that the request would otherwise compute itself; `match` is theirs.
        matches: of each entry.
    """

    own_tokens: int
    matches: list[Match]


class EntryLease(PrefixLease):
    """Reads entries, encodes those that are missing, then computes the request's own tokens."""

    strategy: EntryStrategy[Never]

    def __init__(self, strategy: EntryStrategy[Never], request: Request, imports: Imports):
        super().__init__(strategy, request)
        self.imports = imports

    # -- which entries exist ---------------------------------------------------------------------------------

    def look(self) -> EntriesFound:
        own = super().look()
        matches = [self._match(entry) for entry in self.imports.entries]
        found = EntriesFound(own.tokens, own.match, own.tokens, matches)
        found.tokens = self._num_there(found)
        return found

    def _num_there(self, found: EntriesFound) -> int:
        """Number of prompt tokens with cached KV."""
        pairs = zip(self.imports.entries, found.matches, strict=True)
        return found.own_tokens + sum(entry.length for entry, match in pairs if self._all(entry, match))

    def reads(self) -> list[Run]:
        """The runs of the request's own tokens and of all its entries."""
        entries = self.imports.entries
        return [
            *super().reads(),
            *(entry.run(self._meta(entry)) for entry in entries),
        ]

    def _match(self, entry: Entry) -> Match:
        """The pages of an entry that the request reads: all of them, or those before the rows that it encodes."""
        if not self.cache.enabled:
            return Match()
        match = self.cache.tree.match(entry.key, entry.namespace)
        if self._all(entry, match):
            return match
        # Other pages would be locked for nothing, and the pool may be too small for them beside the request's own.
        start = self._start(entry, match)
        return self.cache.tree.match(entry.key[: start * TOKEN_BYTES], entry.namespace)

    def _all(self, entry: Entry, match: Match) -> bool:
        return len(match.pages) == self.cache.pages_for(entry.length)

    def peer(self, found: Found, computing: Sequence[Lease]) -> tuple[Request, int] | None:
        """A running request that is encoding an entry this request needs, or computing the same own tokens."""
        assert isinstance(found, EntriesFound)
        if self.cache.enabled:
            pairs = zip(self.imports.entries, found.matches, strict=True)
            missing = {entry.namespace for entry, match in pairs if not self._all(entry, match)}
            for other in computing:
                assert isinstance(other, EntryLease)
                if any(one.entry.namespace in missing for one in other.imports.encodings):
                    return other.request, 0
        return super().peer(found, computing)

    # -- running ---------------------------------------------------------------------------------------------

    def admit(self, found: Found, headroom: int) -> bool:
        request = self.request
        cache, imports = self.cache, self.imports
        assert isinstance(found, EntriesFound)
        pairs = list(zip(imports.entries, found.matches, strict=True))
        missing = [(entry, self._start(entry, match)) for entry, match in pairs if not self._all(entry, match)]
        kept = sum(cache.pages_for(entry.length) - start // cache.page_size for entry, start in missing)
        scratch = sum(cache.pages_for(entry.num_holes) for entry, _ in missing)
        nodes = [cache.tree.lock_match(match) for match in found.matches]
        is_first = request.cached_tokens < 0
        if not super().admit(found, headroom + kept + scratch):
            for node in nodes:
                cache.tree.unlock(node)
            return False
        fresh = cache.allocate(kept + scratch, array("i"), request.owner, cached=kept)
        assert fresh is not None, "the room was counted above"
        if is_first:
            request.cached_tokens += found.tokens - found.own_tokens
            imports.computed = [entry for entry, _ in missing]
        read = list(request.segments)
        for (entry, match), node in zip(pairs, nodes, strict=True):
            cache.use(node)
            if self._all(entry, match):
                read.append(Segment(match.pages, entry.length, node=node))
                self._there(entry, match.pages)
            else:
                fresh = self._begin(entry, match, node, fresh)
                read += imports.encodings[-1].held
        request.read(read)
        return True

    def _there(self, entry: Entry, pages: array[int]) -> None:
        """Called when an entry is complete; `pages`: its int32 page ids. Does nothing by default."""

    def _meta(self, entry: Entry) -> EntryMeta | None:
        """The record for an entry's nodes in the tree; None for an exact prefix."""
        return EntryMeta(self.strategy.kind, entry.name, entry.length) if entry.namespace.entry else None

    def _start(self, entry: Entry, match: Match) -> int:
        """The first row of an entry to encode: after its pages in the tree that precede the first hole.

        A request whose KV must not be stored encodes the whole entry into its own pages.
        """
        if not self.request.message.store:
            return 0
        page_size = self.cache.page_size
        before_holes = int(entry.is_kept.argmin()) if entry.num_holes else entry.length
        return min(len(match.pages), before_holes // page_size) * page_size

    def _begin(self, entry: Entry, match: Match, node: Node | None, fresh: array[int]) -> array[int]:
        """Start encoding an entry in the first pages of `fresh`; returns the other pages."""
        request = self.request
        start = self._start(entry, match)
        before = match.pages[: start // self.cache.page_size]
        kept = self.cache.pages_for(entry.length) - len(before)
        size = kept + self.cache.pages_for(entry.num_holes)
        held = [Segment(fresh[:size], 0)]
        if node is not None:
            held.append(Segment(before, 0, node=node))
        pages, scratch = before + fresh[:kept], fresh[kept:size]
        self.imports.encodings.append(Encoding(entry, start, pages, scratch, held))
        request.sequence.pending += len(entry.is_kept) - start
        return fresh[size:]

    def work(self, limit: int) -> Work:
        """The request's share of the next step: missing entries first, as many rows as fit, then own tokens."""
        imports = self.imports
        if not imports.encodings:
            return super().work(limit)
        count = min(imports.left, limit)
        return Work(self.request, 0, count, count)

    def rows(self, work: Work) -> list[RowSet]:
        if not self.imports.encodings:
            return super().rows(work)
        return [self._encode(*part) for part in self.imports.parts(work.count)]

    def _encode(self, one: Encoding, first: int, stop: int) -> RowSet:
        """Rows of an entry with causal attention among its own rows, placeholders included."""
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
            stages=[Stage(range(self.strategy.num_layers), writes, reads)],
            logits=NO_ROWS,
        )

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, imports = work.request, self.imports
        if not imports.encodings:
            return super().book(work, saved, seconds)
        complete = []
        for one, first, stop in imports.parts(work.count):
            one.seconds += seconds * (stop - first) / work.count
            one.at = stop
            if stop == len(one.entry.is_kept):
                complete.append(one)
        self._keep(complete)
        request.sequence.pending -= work.count
        return False

    def _keep(self, complete: list[Encoding]) -> None:
        """Insert complete entries into the tree and make them segments of the request."""
        request = self.request
        imports, known = self.imports, set(complete)
        imports.encodings = [one for one in imports.encodings if one not in known]
        held = {segment for one in complete for segment in one.held}
        segments = [segment for segment in request.segments if segment not in held]
        request.read(segments + [self._insert(one) for one in complete])
        self.strategy.counters[self.strategy.counted[0]] += len(complete)

    def _insert(self, one: Encoding) -> Segment:
        """The segment of a complete entry. Its pages stay the request's own if its KV must not be stored."""
        cache, entry = self.cache, one.entry
        cache.allocator.release(one.scratch)
        node, pages = None, one.pages
        if cache.enabled and self.request.message.store:
            meta = self._meta(entry)
            node, pages = cache.insert(entry.key, pages, entry.namespace, one.seconds, meta, self.request.owner)
            cache.tree.lock(node)
        for segment in one.held:
            cache.tree.unlock(segment.node)
        self._there(entry, pages)
        return Segment(pages, entry.length, node=node)

    def release(self, keep: bool) -> None:
        super().release(keep)
        self.imports.encodings = []

    @abstractmethod
    def _report(self, reused: int, computed: int) -> ReuseReport:
        """The report of a request; `reused`, `computed`: number of its prompt's tokens."""

    def report(self) -> ReuseReport | None:
        """Reported once, with the first token, because no field changes later."""
        request = self.request
        if request.num_output > 1:
            return None
        reused = max(request.cached_tokens, 0)
        return self._report(reused, request.num_prompt - reused)


class EntryStrategy(PrefixStrategy[A]):
    """Looks entries up by their content. The first request that needs a missing entry encodes it.

    An entry is encoded alone, with causal attention among its own rows and at its own positions. The KV of placeholder
    rows goes to scratch pages. The kept rows fill whole pages, so readers need no mask.

    A request's own tokens are cached as in `PrefixStrategy`, in a namespace that depends on the entries they read. The
    request's segments are the cached prefix of its own tokens, if any, and its entries.

    The first of `counted` counts encoded entries. `kind` is the strategy's word for an entry in messages.
    """

    kind: ClassVar[str]

    def __init__(self, cache: PagedCache, num_layers: int, model: ModelInfo):
        super().__init__(cache, num_layers)
        self._model = model

    def _check_count(self, count: int) -> None:
        """Raise InvalidRequest for more entries than the pool has pages, since each entry takes at least one page."""
        if (most := self.cache.pool.num_pages) < count:
            message = f"the prompt reads {count} entries; the KV pool has {most} pages"
            raise InvalidRequest(message, param="reuse", code="context_length_exceeded")

    def _bound(self, request: Request, pages: int, most: int) -> None:
        """Limit the output by context and pool, if the request sets no limit.

        Args:
            request: a request whose own tokens are known.
            pages: pages that it needs in addition to those of its own tokens and output.
            most: number of own tokens and output tokens that fit into the context.

        Raises:
            InvalidRequest: if the request needs more pages than the pool has.
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

    def meta_of(self, namespace: Namespace, described: Mapping[str, object]) -> EntryMeta | None:
        if not namespace.entry.startswith(f"{self.kind}:"):
            return None
        more = dict(described)
        name, tokens = more.pop(self.kind), more.pop(f"{self.kind}_tokens")
        return EntryMeta(self.kind, msgspec.convert(name, str), msgspec.convert(tokens, int), more)


def _see(pages: array[int], seen: np.ndarray, page_size: int) -> Read:
    """A read of the first rows in `pages`. `seen`: int32 [n], ascending, how many rows each query row sees."""
    length, blind = int(seen[-1]), int(np.searchsorted(seen, 1))
    table = np.frombuffer(pages, dtype=np.int32)[: -(-length // page_size)]
    visible = seen[blind:] if len(seen) - blind > 1 else None
    return Read(table, length, visible=visible, rows=slice(blind, None) if blind else None)
