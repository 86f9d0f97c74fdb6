"""The `fusion` strategy: prompts read cached documents at any position and recompute a few of their rows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec
import numpy as np
import torch
from msgspec import UNSET

from radix import Namespace
from runtime.asks import DocumentsAsk, DocumentsReport, Pairs
from runtime.batch import Read, RowSet, Stage, causal_visible
from runtime.errors import InvalidRequest
from runtime.execution.executor import Executor
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment
from runtime.kv.segments import Sequence as Own
from runtime.protocol import ModelInfo
from runtime.request import Found, Request, Work
from runtime.reuse.entries.entry import Entry, digest, read_tokens
from runtime.reuse.entries.strategy import EntriesFound, EntryLease, EntryStrategy, Imports
from runtime.reuse.fusion.choices import Choices
from runtime.reuse.fusion.layout import EntryPlace, Layout, chunks_of, titles_of
from runtime.reuse.fusion.looks import DenseLook, Look
from runtime.reuse.fusion.methods import METHODS, Method, Scored

_NO_ROWS = np.zeros(0, dtype=np.int64)


class Phase(Enum):
    """What a running request computes now. The phases have this order; a phase without work is skipped.

    ENCODE: missing chunks, and whole pages before the first document.
    LOOK: the pass before rows are chosen. The method chooses at its end.
    FUSE: own and chosen rows, up to the end of the prompt for which the rows were chosen.
    DECODE: all later rows: the rest of the prompt in a later turn, and the output.
    """

    ENCODE = auto()
    LOOK = auto()
    FUSE = auto()
    DECODE = auto()


@dataclass(slots=True, kw_only=True)
class Fused(Imports):
    """The state of a request that reads documents.

    Attributes:
        namespace: the tenant's namespace; `request.namespace` is the namespace of the request's own rows instead.
        phase: the current phase of a running request.
        selected: int64 ascending, the document rows that are computed again; None: not chosen yet.
        selected_for: number of leading prompt tokens for which the rows were chosen; less than all in a later turn.
        num_fused: number of rows of the sequence that belong to these tokens.
        look: the pass before rows are chosen; a `DenseLook` stays until its rows are fused. None: no pass.
        held: two segments: the temporary pages of `look`, and pages for the rows that the method will choose.
    """

    layout: Layout
    method: Method
    namespace: Namespace
    phase: Phase = Phase.ENCODE
    selected: np.ndarray | None = None
    selected_for: int = 0
    num_fused: int = 0
    look: Look | None = None
    held: list[Segment] = field(default_factory=list)

    @property
    def running(self) -> Look:
        """The look, in the phase LOOK."""
        assert self.look is not None
        return self.look

    @property
    def chosen(self) -> np.ndarray:
        """`selected`; empty before the choice."""
        return _NO_ROWS if self.selected is None else self.selected


class FusionLease(EntryLease):
    """Reads documents at any position, and computes a few of their rows again; see `Phase`."""

    strategy: Fusion

    def __init__(self, strategy: Fusion, request: Request, fused: Fused):
        super().__init__(strategy, request, fused)
        self.fused = fused
        method, length = fused.method, len(fused.layout.prompt)
        if method.look is None:
            self._select(method.choose(None), length)
        elif not method.count():
            self._select(_NO_ROWS, length)
        else:
            self._arrange(_NO_ROWS)
            self._recall()

    # -- which rows are computed -----------------------------------------------------------------------------

    def _arrange(self, chosen: np.ndarray) -> None:
        """Rebuild the request's sequence from own and chosen rows; nothing of it is computed yet."""
        request, fused = self.request, self.fused
        layout, sequence = fused.layout, request.sequence
        rows = layout.computed(chosen)
        limit = request.max_length - request.prompt_len
        sequence.tokens = array("i", layout.prompt[rows].tobytes())
        sequence.anchors = _anchors(rows)
        sequence.start, sequence.num_computed = 0, 0
        request.prompt_len = len(rows)
        request.max_length = len(rows) + limit
        is_read = np.ones(len(layout.prompt), dtype=bool)
        is_read[rows] = False
        request.entry_tokens = array("i", layout.prompt[is_read].tobytes())
        layout.keep(rows)
        # No row is committed before the choice. This namespace makes requests with the same prompt wait for it.
        fused.num_fused = len(rows)
        request.namespace = fused.namespace.for_entry("fused", digest(layout.prompt.tobytes()))

    def _select(self, chosen: np.ndarray, chosen_for: int) -> None:
        """Apply the choice that was made for the first `chosen_for` tokens of the prompt."""
        fused = self.fused
        self._arrange(chosen)
        fused.selected, fused.selected_for = chosen, chosen_for
        fused.num_fused = int(np.searchsorted(fused.layout.computed(chosen), chosen_for))
        places = [(digest(place.entry.key), place.start) for place in fused.layout.places]
        # After a dense look, rows up to `chosen_for` read other KV in layer 1 than later rows.
        until = chosen_for if self._is_dense else 0
        # If the prompt ends with a document, its last row is computed for the logits, but not in a longer prompt.
        forced = len(fused.layout.prompt) if fused.layout.ask.documents[-1][1] == len(fused.layout.prompt) else 0
        content = msgspec.msgpack.encode((places, chosen.tobytes(), until, forced))
        self.request.namespace = fused.namespace.for_entry("fused", digest(content))

    def _recall(self) -> None:
        """Apply a remembered choice for the same prompt or for an earlier turn, if there is one."""
        fused = self.fused
        if (choice := self.strategy.choices.recall(fused.layout, fused.namespace)) is not None:
            self._select(*choice)

    @property
    def _is_dense(self) -> bool:
        return self.fused.method.look is DenseLook and self.fused.method.count() > 0

    # -- what exists -----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take a choice that another request has made meanwhile."""
        if self.fused.selected is None:
            self._recall()

    def _num_there(self, found: EntriesFound) -> int:
        """Number of prompt tokens with cached KV. A document row with stored and with recomputed KV counts once."""
        fused, pairs = self.fused, zip(self.fused.entries, found.matches, strict=True)
        there = {entry.namespace for entry, match in pairs if self._all(entry, match)}
        is_there = np.zeros(len(fused.layout.prompt), dtype=bool)
        for place in fused.layout.places:
            if place.entry.namespace in there:
                is_there[place.start : place.start + place.entry.length] = True
        computed = fused.layout.computed(fused.chosen)
        is_there[computed[: found.own_tokens]] = True
        return int(is_there.sum()) + max(found.own_tokens - len(computed), 0)

    def _there(self, entry: Entry, pages: array[int]) -> None:
        for place in self.fused.layout.places:
            if place.entry.namespace == entry.namespace:
                place.set_pages(pages)

    def admit(self, found: Found, headroom: int) -> bool:
        request, fused = self.request, self.fused
        # Fused rows read the result of the dense look, so it is repeated unless all fused rows are cached.
        assert isinstance(found, EntriesFound)
        misses = self._is_dense and found.own_tokens < fused.num_fused
        look = fused.method.look if fused.selected is None or misses else None
        own, more = self.strategy.look_pages(fused) if look else (0, 0)
        fused.layout.keep(fused.layout.computed(fused.chosen))
        if not super().admit(found, headroom + own + more):
            return False
        if look is not None:
            pages = self.cache.allocate(own + more, array("i"), request.owner, cached=0)
            assert pages is not None, "the room was counted above"
            fused.held = [Segment(pages[:own], 0), Segment(pages[own:], 0)]
            request.read((*request.segments, *fused.held))
            fused.look = look(fused.layout, request.sequence, pages[:own], self.strategy.executor)
            request.sequence.pending += fused.look.num_rows
        fused.phase = Phase.ENCODE
        self._advance()
        return True

    def grow(self, ahead: int = 0) -> bool:
        """No drafts during a look or fusion: rows after the last fused row read other KV in layer 1."""
        return not (ahead and self.fused.look is not None) and super().grow(ahead)

    # -- phases ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Enter the next phase, repeatedly, while the current phase has nothing left to compute."""
        fused, done = self.fused, self.request.sequence.num_computed
        if fused.phase is Phase.ENCODE and not fused.encodings:
            fused.phase = Phase.FUSE if fused.look is None else Phase.LOOK
        if fused.phase is Phase.LOOK and fused.running.done == fused.running.num_rows:
            self._choose()
            fused.phase = Phase.FUSE
        if fused.phase is Phase.FUSE and done >= fused.num_fused:
            self._end_look()
            fused.phase = Phase.DECODE

    def work(self, limit: int) -> Work:
        """The request's share of the next step. A step ends with the phase and with the prompt."""
        request = self.request
        fused, done = self.fused, request.sequence.num_computed
        if fused.phase is Phase.LOOK:
            look = fused.running
            count = min(look.num_rows - look.done, limit)
            return Work(request, look.done, count, count)
        if fused.phase is Phase.FUSE:
            limit = min(limit, fused.num_fused - done)
        elif fused.phase is Phase.DECODE and done < request.prompt_len:
            limit = min(limit, request.prompt_len - done)
        return super().work(limit)

    def rows(self, work: Work) -> list[RowSet]:
        fused = self.fused
        if fused.phase is Phase.LOOK:
            return [fused.running.rows(work.start, work.start + work.count)]
        return super().rows(work)

    def _stages(self, first: int, stop: int) -> list[Stage]:
        request = self.request
        fused, sequence, page_size = self.fused, request.sequence, self.cache.page_size
        positions = sequence.positions(first, stop)
        writes = sequence.slots(first, stop, page_size)
        reads = [read for place in fused.layout.places for read in place.reads(positions, page_size)]
        own = _own_read(request, first, stop, page_size)
        stages = [Stage(range(self.strategy.num_layers), writes, [*reads, own])]
        if isinstance(fused.look, DenseLook):
            before = [r for place in fused.layout.places if place.is_exact for r in place.reads(positions, page_size)]
            stages = [
                Stage(range(1), writes, [*reads, own]),
                Stage(range(1, 2), writes, [*before, fused.look.read(positions)]),
                Stage(range(2, self.strategy.num_layers), writes, [*reads, own]),
            ]
        return stages

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, fused = work.request, self.fused
        stop = work.start + work.count
        if fused.phase is Phase.LOOK:
            fused.running.take(work.start, stop, saved[0])
            fused.running.done += work.count
            request.sequence.pending -= work.count
            has_logits = False
        else:
            has_logits = super().book(work, saved, seconds)
        self._advance()
        return has_logits

    def _choose(self) -> None:
        """Choose rows after a look. A retracted request keeps the rows that it chose before."""
        request = self.request
        fused, sequence = self.fused, request.sequence
        if fused.selected is None:
            chosen = fused.method.choose(fused.look)
            if request.message.store:
                self.strategy.choices.keep(fused.layout, fused.namespace, chosen)
            self._select(chosen, len(fused.layout.prompt))
            sequence.pages = sequence.pages + fused.held[1].pages  # a plan may still read the old ones
            last = fused.held.pop()
            request.read(segment for segment in request.segments if segment is not last)
            self.strategy.counters["fused_rows"] += len(chosen)
        if not isinstance(fused.look, DenseLook):
            self._end_look()

    def _end_look(self) -> None:
        request, fused = self.request, self.fused
        for segment in fused.held:
            self.cache.leave(segment)
        request.read(segment for segment in request.segments if segment not in fused.held)
        fused.look, fused.held = None, []

    def release(self, keep: bool) -> None:
        super().release(keep)
        fused = self.fused
        fused.look, fused.held = None, []

    def distrust(self) -> None:
        """Also forget the rows that bad numbers may have chosen."""
        self.strategy.choices.forget(self.fused.layout, self.fused.namespace)
        super().distrust()

    def _report(self, reused: int, computed: int) -> DocumentsReport:
        fused, ask = self.fused, self.fused.layout.ask
        missing = {entry.namespace for entry in fused.computed}
        entries = [place.entry for place in fused.layout.places if place.is_document]
        cached = {entry.name for entry in entries} - {entry.name for entry in entries if entry.namespace in missing}
        titles = list(dict.fromkeys(titles_of(ask)))
        nothing = isinstance(fused.method, Scored) and not len(fused.chosen)
        return DocumentsReport(
            method=ask.select,
            ratio=ask.ratio,
            granularity=ask.granularity,
            chunk_tokens=ask.chunk_tokens,
            k=ask.k if ask.select == "legolink" and ask.ratio is None else UNSET,
            documents=titles,
            computed_documents=[title for title in titles if title not in cached],
            chosen_before=0 < fused.selected_for < len(fused.layout.prompt),
            recomputed_rows=len(fused.chosen),
            row_layers=self.request.row_layers,
            reused_tokens=reused,
            computed_tokens=computed,
            note=f"{ask.select} computed no row again: this is the answer of pie" if nothing else UNSET,
        )


class Fusion(EntryStrategy[DocumentsAsk]):
    """Chunks of documents are entries that are encoded alone at position 0 and read with a shift.

    The sequence has the request's own rows and the chosen document rows, by position. Each row reads the earlier entry
    rows that were not chosen, and the sequence up to itself. Whole pages before the first document are also an
    entry: an exact prefix, in the request's own namespace.

    A request goes through the phases of `Phase`, with LOOK only if the method has a look. After a `DenseLook`, fused
    rows read the exact KV that it computed in layer 1. Rows of the phase DECODE read the stored KV there.
    """

    name = "fusion"
    kind = "document"
    steady = False
    counted = ("encoded_documents", "fused_rows")

    def __init__(self, cache: PagedCache, executor: Executor, model: ModelInfo):
        super().__init__(cache, executor.spec.num_layers, model)
        self.executor = executor
        self.choices = Choices()

    def open(self, request: Request, ask: DocumentsAsk) -> FusionLease:
        if request.sampler.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts whose documents are reused have no log-probabilities", param="reuse")
        tokens = read_tokens(request.sequence.tokens.tobytes(), self._model.vocab_size, "the prompt")
        layout = self._layout(tokens, ask, request.namespace)
        method = METHODS[ask.select](layout)
        if method.look is not None and self.executor.spec.num_kv_heads != self.cache.pool.k.shape[2]:
            raise InvalidRequest(f"method {method.name!r} is not served by several ranks", param="reuse.method")
        entries = {place.entry.namespace: place.entry for place in layout.places}
        fused = Fused([*entries.values()], layout=layout, method=method, namespace=request.namespace)
        lease = FusionLease(self, request, fused)
        pages = sum(self.cache.pages_for(entry.length) for entry in entries.values())
        self._bound(request, pages + sum(self.look_pages(fused)), request.max_length)
        return lease

    def _layout(self, tokens: array[int], ask: DocumentsAsk, namespace: Namespace) -> Layout:
        chunks, prefix = list(chunks_of(ask)), self.cache.page_size * (ask.documents[0][0] // self.cache.page_size)
        self._check_count(len(chunks))
        places = [self._place(tokens, chunk, namespace) for chunk in chunks]
        if prefix:
            places.insert(0, self._place(tokens, (0, prefix, "prefix"), namespace, False))
        last = len(tokens) - 1
        if METHODS[ask.select].reuses_question and ask.documents[-1][1] < last:
            question = (ask.documents[-1][1], last, "question")
            places.append(self._place(tokens, question, namespace, False))
        return Layout(np.frombuffer(tokens, dtype=np.int32), places, ask, self.cache.page_size)

    def _place(
        self, tokens: array[int], chunk: tuple[int, int, str], namespace: Namespace, is_document: bool = True
    ) -> EntryPlace:
        start, stop, name = chunk
        mine, kept = tokens[start:stop], np.ones(stop - start, dtype=bool)
        if start or is_document:
            namespace = namespace.for_entry("document", digest(mine.tobytes()))
        entry = Entry(name, Own(mine), kept, namespace, self.cache.page_size)
        return EntryPlace(entry, start, is_document, kept)

    def runs(self, tokens: array[int], namespace: Namespace, ask: DocumentsAsk | None = None) -> list[Run]:
        """One run for each different chunk of a document."""
        assert ask is not None
        entries = [p.entry for p in self._layout(tokens, ask, namespace).places if p.is_document]
        return [entry.run() for entry in {entry.namespace: entry for entry in entries}.values()]

    def look_pages(self, fused: Fused) -> tuple[int, int]:
        """Number of pages for the look, and for rows that the method has yet to choose."""
        if fused.method.look is None or not (count := fused.method.count()):
            return 0, 0
        own = fused.method.look.length(fused.layout) if fused.method.look.writes_pages else 0
        return self.cache.pages_for(own), self.cache.pages_for(count if fused.selected is None else 0)

    def flush(self) -> None:
        self.choices.clear()


def _own_read(request: Request, first: int, stop: int, page_size: int) -> Read:
    """A causal read of the sequence by its rows `first` to `stop` (exclusive)."""
    sequence = request.sequence
    pages = sequence.pages[: -(-(stop - sequence.start) // page_size)]
    if sequence.start:
        pages = request.segments[0].pages + pages
    return Read(np.frombuffer(pages, dtype=np.int32), stop, visible=causal_visible(stop, stop - first))


def _anchors(rows: np.ndarray) -> Pairs:
    """Anchors, pairs (index, position), of a sequence that consists of these ascending prompt rows."""
    jumps = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return list(zip(jumps.tolist(), rows[jumps].tolist(), strict=True))
