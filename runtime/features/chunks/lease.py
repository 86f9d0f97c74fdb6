"""The lease of a request with chunks: it encodes missing ones, looks, chooses rows, and computes its own and these."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from radix import Match, Node
from radix.namespace import APPROXIMATE
from radix.node import TOKEN_BYTES
from runtime.batch import Read, RowSet, Stage, causal_visible
from runtime.features.chunks.ask import DocumentsReport, ModulesReport
from runtime.features.chunks.encoding import Encoding
from runtime.features.chunks.entry import Entry, EntryMeta, digest
from runtime.features.chunks.layout import Layout, anchors_of
from runtime.features.chunks.looks import DenseLook, Look
from runtime.features.chunks.methods import Method
from runtime.features.chunks.reports import report_of
from runtime.kv.segments import Run, Segment
from runtime.request import Found, Lease, Request, Work
from runtime.reuse.prefix import PrefixLease

if TYPE_CHECKING:
    from runtime.features.chunks.strategy import ChunkReuse

_NO_ROWS = np.zeros(0, dtype=np.int64)
# The namespaces of own and repaired rows.
_ROWS = {"document": APPROXIMATE, "module": "rows"}


@dataclass(slots=True)
class EntriesFound(Found):
    """A look-up of a prompt with entries.

    Attributes:
        own_tokens: of `tokens`, those that the request would otherwise compute itself; `match` is theirs.
        matches: of each entry.
    """

    own_tokens: int
    matches: list[Match]


class ChunkLease(PrefixLease):
    """Reads entries, and computes a sequence of the request's own rows and of chosen rows of chunks, by position.

    A running request first encodes missing entries, and whole pages before the first document. Then comes the look of a
    method that has one; at its end, the method chooses. After a `DenseLook`, the rows of the prompt for which rows were
    chosen read the exact KV that it computed in layer 1. Later rows read the stored KV there.

    Attributes:
        layout, method: what the request asks.
        space: the tenant's namespace; `request.namespace` is the namespace of the request's own rows instead.
        entries: the entries of `layout`, each once, longest first, so that equal reads are neighbours.
        encodings: the entries that the request encodes itself, in order.
        lead: scratch pages with the KV of the lead, which the first encoding behind it computes, and the others
            read; None: no such encoding is left.
        computed: the entries that were missing when the request was first admitted.
        selected: int64 ascending, the rows of chunks that are computed again; None: not chosen yet.
        selected_for: number of leading prompt tokens for which the rows were chosen; less than all in a later turn.
        num_chosen_for: number of rows of the sequence that belong to these tokens.
        preview: the look before rows are chosen; a `DenseLook` stays until the rows that read it are computed.
        held: two segments: the temporary pages of `preview`, and pages for the rows that the method will choose.
    """

    strategy: ChunkReuse

    def __init__(self, strategy: ChunkReuse, request: Request, layout: Layout, method: Method):
        super().__init__(strategy, request)
        self.layout, self.method, self.space = layout, method, request.namespace
        entries = {place.entry.namespace: place.entry for place in layout.places}
        self.entries = sorted(entries.values(), key=lambda entry: (-entry.length, entry.namespace))
        self.encodings: list[Encoding] = []
        self.lead: Segment | None = None
        self.computed: list[Entry] = []
        self.selected: np.ndarray | None = None
        self.selected_for = self.num_chosen_for = 0
        self.preview: Look | None = None
        self.held: list[Segment] = []
        if method.look is None:
            self._select(method.choose(None), len(layout.prompt))
        elif not method.count():
            self._select(_NO_ROWS, len(layout.prompt))
        else:
            self._arrange(_NO_ROWS)
            self._recall()

    # -- which rows are computed -----------------------------------------------------------------------------

    @property
    def chosen(self) -> np.ndarray:
        """`selected`; empty before the choice."""
        return _NO_ROWS if self.selected is None else self.selected

    @property
    def steady(self) -> bool:
        """Not during a look, nor until the rows that read it are computed: later rows read other KV in layer 1."""
        return self.preview is None

    def _arrange(self, chosen: np.ndarray) -> None:
        """Rebuild the request's sequence from own and chosen rows; nothing of it is computed yet."""
        request, layout, sequence = self.request, self.layout, self.request.sequence
        rows = layout.computed(chosen)
        limit = request.max_length - request.prompt_len
        sequence.tokens = array("i", layout.prompt[rows].tobytes())
        sequence.anchors = anchors_of(layout.positions[rows])
        sequence.start, sequence.num_computed = 0, 0
        request.prompt_len = self.num_chosen_for = len(rows)
        request.max_length = len(rows) + limit
        request.entry_tokens = array("i", np.delete(layout.prompt, rows).tobytes())
        layout.keep(rows)
        # No row is committed before the choice. This namespace makes requests with the same prompt wait for it.
        self._enter(digest(layout.prompt.tobytes()))

    def _enter(self, name: str) -> None:
        self.request.namespace = self.space.for_entry(_ROWS[self.layout.ask.kind], name)

    def _select(self, chosen: np.ndarray, chosen_for: int) -> None:
        """Apply the choice that was made for the first `chosen_for` tokens of the prompt."""
        self._arrange(chosen)
        layout, anchors = self.layout, self.request.sequence.anchors
        self.selected, self.selected_for = chosen, chosen_for
        self.num_chosen_for = int(np.searchsorted(layout.computed(chosen), chosen_for))
        read = sorted((place.entry.namespace.entry or digest(place.entry.key), place.shift) for place in layout.places)
        # After a dense look, rows up to `chosen_for` read other KV in layer 1 than later rows.
        until = chosen_for if self._is_dense else 0
        # If the prompt ends with a chunk, its last row is computed for the logits, but not in a longer prompt.
        forced = len(layout.prompt) if layout.end == len(layout.prompt) else 0
        content = (self.method.reads_all, read, anchors, chosen.tobytes(), until, forced)
        self._enter(digest(msgspec.msgpack.encode(content)))

    def _recall(self) -> None:
        """Apply a remembered choice for the same prompt or for an earlier turn, if there is one."""
        if (choice := self.strategy.choices.recall(self.layout, self.space)) is not None:
            self._select(*choice)

    @property
    def _is_dense(self) -> bool:
        return self.method.look is DenseLook and self.method.count() > 0

    @property
    def look_pages(self) -> tuple[int, int]:
        """Number of pages for the look, and for rows that the method has yet to choose."""
        look, count = self.method.look, self.method.count()
        if look is None or not count:
            return 0, 0
        own = look.length(self.layout) if look.writes_pages else 0
        return self.cache.pages_for(own), self.cache.pages_for(count if self.selected is None else 0)

    # -- what exists -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take a choice that another request has made meanwhile."""
        if self.selected is None:
            self._recall()

    def look(self) -> EntriesFound:
        own = super().look()
        found = EntriesFound(own.tokens, own.match, own.tokens, [self._match(entry) for entry in self.entries])
        found.tokens = self._num_there(found)
        return found

    def _pairs(self, found: EntriesFound) -> Iterator[tuple[Entry, Match]]:
        return zip(self.entries, found.matches, strict=True)

    def _num_there(self, found: EntriesFound) -> int:
        """Number of prompt tokens with cached KV. A row with stored and with recomputed KV counts once."""
        layout = self.layout
        there = {entry.namespace for entry, match in self._pairs(found) if self._all(entry, match)}
        is_there = np.zeros(len(layout.prompt), dtype=bool)
        for place in layout.places:
            if place.entry.namespace in there:
                is_there[place.rows] = True
        computed = layout.computed(self.chosen)
        is_there[computed[: found.own_tokens]] = True
        return int(is_there.sum()) + max(found.own_tokens - len(computed), 0)

    def reads(self) -> list[Run]:
        """The runs of the request's own tokens and of all its entries."""
        return super().reads() + [entry.run(self._meta(entry)) for entry in self.entries]

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
            missing = {entry.namespace for entry, match in self._pairs(found) if not self._all(entry, match)}
            for other in computing:
                assert isinstance(other, ChunkLease)
                if any(one.entry.namespace in missing for one in other.encodings):
                    return other.request, 0
        return super().peer(found, computing)

    # -- admission -------------------------------------------------------------------------------------------

    def admit(self, found: Found, headroom: int) -> bool:
        assert isinstance(found, EntriesFound)
        request, cache, layout = self.request, self.cache, self.layout
        missing = [(e, self._start(e, match)) for e, match in self._pairs(found) if not self._all(e, match)]
        kept = sum(cache.pages_for(entry.length) - start // cache.page_size for entry, start in missing)
        scratch = self.scratch_pages(entry for entry, _ in missing)
        # Rows that read the result of a dense look repeat it, unless all of them are cached.
        misses = self._is_dense and found.own_tokens < self.num_chosen_for
        look = self.method.look if self.selected is None or misses else None
        looked, chosen = self.look_pages if look else (0, 0)
        nodes = [cache.tree.lock_match(match) for match in found.matches]
        is_first = request.cached_tokens < 0
        if not super().admit(found, headroom + kept + scratch + looked + chosen):
            for node in nodes:
                cache.tree.unlock(node)
            return False
        fresh = cache.allocate(kept + scratch + looked + chosen, array("i"), request.owner, cached=kept)
        assert fresh is not None, "the room was counted above"
        if layout.ask.lead and scratch:
            self.lead, fresh = Segment(fresh[:scratch], 0), fresh[scratch:]
        if is_first:
            request.cached_tokens += found.tokens - found.own_tokens
            self.computed = [entry for entry, _ in missing]
        read = list(request.segments)
        for (entry, match), node in zip(self._pairs(found), nodes, strict=True):
            cache.use(node)
            if self._all(entry, match):
                read.append(Segment(match.pages, entry.length, node=node))
                self._place(entry, match.pages)
            else:
                fresh = self._begin(entry, match, node, fresh)
                read += self.encodings[-1].held
        if look is not None:
            self.held = [Segment(fresh[:looked], 0), Segment(fresh[looked:], 0)]
            self.preview = look(layout, request.sequence, fresh[:looked], self.strategy.executor)
            request.sequence.pending += self.preview.num_rows
        if self.lead is not None:
            read.append(self.lead)
        request.read([*read, *self.held])
        return True

    def scratch_pages(self, entries: Iterable[Entry]) -> int:
        """Number of pages for the holes of entries that are encoded; documents share those of their lead."""
        holes = [self.cache.pages_for(entry.num_holes) for entry in entries]
        return max(holes, default=0) if self.layout.ask.lead else sum(holes)

    def _place(self, entry: Entry, pages: array[int]) -> None:
        """Read a complete entry from its int32 page ids."""
        for place in self.layout.places:
            if place.entry.namespace == entry.namespace:
                place.set_pages(pages)

    def _meta(self, entry: Entry) -> EntryMeta | None:
        """The record for an entry's nodes in the tree; None for an exact prefix."""
        ask = self.layout.ask
        more = {"schema": ask.schema} if ask.kind == "module" else {}
        return EntryMeta(ask.kind, entry.name, entry.length, more) if entry.namespace.entry else None

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
        start = self._start(entry, match)
        before = match.pages[: start // self.cache.page_size]
        kept = self.cache.pages_for(entry.length) - len(before)
        is_led = self.lead is not None and entry.num_holes > 0
        size = kept if is_led else kept + self.cache.pages_for(entry.num_holes)
        held = [Segment(fresh[:size], 0)]
        if node is not None:
            held.append(Segment(before, 0, node=node))
        scratch = self.lead.pages if is_led and self.lead is not None else fresh[kept:size]
        if is_led and any(one.entry.num_holes for one in self.encodings):
            start = entry.num_holes  # another encoding computes the lead
        one = Encoding(entry, start, before + fresh[:kept], scratch, held)
        self.encodings.append(one)
        self.request.sequence.pending += one.left
        return fresh[size:]

    # -- running ---------------------------------------------------------------------------------------------

    def grow(self, ahead: int = 0) -> bool:
        """No drafts until the rows that read a look are computed: rows behind them read other KV in layer 1."""
        return not (ahead and self.preview is not None) and super().grow(ahead)

    @property
    def _looking(self) -> Look | None:
        """The look, if it is not complete."""
        look = self.preview
        return look if look is not None and look.done < look.num_rows else None

    def work(self, limit: int) -> Work:
        """The request's share of the next step, which ends with the encodings, a look, or the rows that read it."""
        if self.encodings:
            count = min(sum(one.left for one in self._ready), limit)
            return Work(self.request, 0, count, count)
        if (look := self._looking) is not None:
            count = min(look.num_rows - look.done, limit)
            return Work(self.request, look.done, count, count)
        if self.preview is not None:
            limit = min(limit, self.num_chosen_for - self.request.sequence.num_computed)
        return super().work(limit)

    @property
    def _ready(self) -> list[Encoding]:
        """The encodings that may run: while one computes the lead, none of those that read it."""
        leading = next((one for one in self.encodings if self.lead is not None and one.at < one.entry.num_holes), None)
        return [one for one in self.encodings if leading in (None, one) or not one.entry.num_holes]

    def _parts(self, count: int) -> Iterator[tuple[Encoding, int]]:
        """The next `count` rows to encode, as rows of each encoding."""
        for one in self._ready:
            if mine := min(one.left, count):
                yield one, mine
                count -= mine

    def rows(self, work: Work) -> list[RowSet]:
        if self.encodings:
            size, layers = self.cache.page_size, self.strategy.num_layers
            return [one.rows(count, size, layers) for one, count in self._parts(work.count)]
        if (look := self._looking) is not None:
            return [look.rows(work.start, work.start + work.count)]
        return super().rows(work)

    def _stages(self, first: int, stop: int) -> list[Stage]:
        if self.method.reads_all:
            return super()._stages(first, stop)
        request, places, layers = self.request, self.layout.places, self.strategy.num_layers
        sequence, page_size = request.sequence, self.cache.page_size
        positions = sequence.positions(first, stop)
        writes = sequence.slots(first, stop, page_size)
        reads = [read for place in places for read in place.reads(positions, page_size)]
        own = _own_read(request, first, stop, page_size)
        if not isinstance(self.preview, DenseLook):
            return [Stage(range(layers), writes, [*reads, own])]
        before = [read for place in places if place.is_exact for read in place.reads(positions, page_size)]
        return [
            Stage(range(1), writes, [*reads, own]),
            Stage(range(1, 2), writes, [*before, self.preview.read(positions)]),
            Stage(range(2, layers), writes, [*reads, own]),
        ]

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        sequence = self.request.sequence
        if self.encodings:
            sequence.pending -= work.count
            self._book_encodings(work, seconds)
            return False
        if (look := self._looking) is not None:
            sequence.pending -= work.count
            look.take(work.start, work.start + work.count, saved[0])
            look.done += work.count
            if look.done == look.num_rows:
                self._choose()
            return False
        has_logits = super().book(work, saved, seconds)
        if self.preview is not None and sequence.num_computed >= self.num_chosen_for:
            self._end_look()
        return has_logits

    def _book_encodings(self, work: Work, seconds: float) -> None:
        """Insert complete entries into the tree, and make them segments of the request."""
        complete = []
        for one, count in self._parts(work.count):
            one.seconds += seconds * count / work.count
            one.at += count
            if not one.left:
                complete.append(one)
                self.encodings.remove(one)
        held = {segment for one in complete for segment in one.held}
        segments = [segment for segment in self.request.segments if segment not in held]
        self.request.read(segments + [self._insert(one) for one in complete])
        if self.lead is not None and not any(one.entry.num_holes for one in self.encodings):
            lead, self.lead = self.lead, None
            self.request.read(segment for segment in self.request.segments if segment is not lead)
            self.cache.allocator.release(lead.pages)
        self.strategy.counters[f"encoded_{self.layout.ask.kind}s"] += len(complete)

    def _insert(self, one: Encoding) -> Segment:
        """The segment of a complete entry. Its pages stay the request's own if its KV must not be stored."""
        cache, entry = self.cache, one.entry
        if self.lead is None:
            cache.allocator.release(one.scratch)
        node, pages = None, one.pages
        if cache.enabled and self.request.message.store:
            meta = self._meta(entry)
            node, pages = cache.insert(entry.key, pages, entry.namespace, one.seconds, meta, self.request.owner)
            cache.tree.lock(node)
        for segment in one.held:
            cache.tree.unlock(segment.node)
        self._place(entry, pages)
        return Segment(pages, entry.length, node=node)

    def _choose(self) -> None:
        """Choose rows after a look. A retracted request keeps the rows that it chose before."""
        request, sequence = self.request, self.request.sequence
        if self.selected is None:
            chosen = self.method.choose(self.preview)
            if request.message.store:
                self.strategy.choices.keep(self.layout, self.space, chosen)
            self._select(chosen, len(self.layout.prompt))
            sequence.pages = sequence.pages + self.held[1].pages  # a plan may still read the old ones
            last = self.held.pop()
            request.read(segment for segment in request.segments if segment is not last)
            self.strategy.counters["fused_rows"] += len(chosen)
        if not isinstance(self.preview, DenseLook):
            self._end_look()

    def _end_look(self) -> None:
        for segment in self.held:
            self.cache.leave(segment)
        self.request.read(segment for segment in self.request.segments if segment not in self.held)
        self.preview, self.held = None, []

    # -- the end ---------------------------------------------------------------------------------------------

    def release(self, keep: bool) -> None:
        super().release(keep)
        self.encodings, self.preview, self.held, self.lead = [], None, [], None

    def distrust(self) -> None:
        """Also forget the rows that bad numbers may have chosen."""
        self.strategy.choices.forget(self.layout, self.space)
        super().distrust()

    def report(self) -> DocumentsReport | ModulesReport | None:
        """Reported once, with the first token, because no field changes later."""
        return None if self.request.num_output > 1 else report_of(self)


def _own_read(request: Request, first: int, stop: int, page_size: int) -> Read:
    """A causal read of the sequence by its rows `first` to `stop` (exclusive)."""
    sequence = request.sequence
    pages = sequence.pages[: -(-(stop - sequence.start) // page_size)]
    if sequence.start:
        pages = request.segments[0].pages + pages
    return Read(np.frombuffer(pages, dtype=np.int32), stop, visible=causal_visible(stop, stop - first))
