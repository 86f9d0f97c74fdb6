"""The `fusion` strategy: documents are read wherever they stand, and a few of their rows are computed again."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from radix import Match, Namespace
from runtime.batch import causal_visible
from runtime.errors import InvalidRequest
from runtime.execution.executor import Executor
from runtime.kv.cache import PagedCache
from runtime.protocol import ModelInfo
from runtime.request import Request, Run, Segment, Work
from runtime.request import Sequence as Own
from runtime.reuse.build import Read, RowSet, Stage
from runtime.reuse.entries.entry import Entry, Pairs, read_tokens
from runtime.reuse.entries.strategy import EntryStrategy, Imports
from runtime.reuse.fusion.choices import Choices
from runtime.reuse.fusion.layout import Asked, DocumentMeta, Layout, Place
from runtime.reuse.fusion.looks import DenseLook, Look
from runtime.reuse.fusion.methods import METHODS, Method
from runtime.reuse.fusion.snapkv import SnapKV
from runtime.reuse.strategy import Found

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class Fused(Imports):
    """A request that reads documents.

    Attributes:
        namespace: of the request, before it was that of its own rows.
        selected: int64, the document rows that are computed again, ascending; None: that is not known yet.
        selected_for: leading tokens of the prompt for which they were chosen, before later turns.
        num_fused: rows of the sequence up to there.
        look: the pass before rows are fused, while they are.
        held: its pages, and pages for the rows to be chosen.
        snap: the choice of rows that stay behind the first token; None: all do.
    """

    layout: Layout
    method: Method
    namespace: Namespace
    selected: np.ndarray | None = None
    selected_for: int = 0
    num_fused: int = 0
    look: Look | None = None
    held: list[Segment] = field(default_factory=list)
    snap: SnapKV | None = None

    @property
    def chosen(self) -> np.ndarray:
        """`selected`, none as long as that is not known."""
        return _NO_ROWS if self.selected is None else self.selected


class Fusion(EntryStrategy):
    """Chunks of documents are entries, encoded alone at position 0, and read with a shift.

    The sequence holds own rows and chosen document rows in the order of their positions. Each sees the rows of entries
    that lie before it and were not chosen, and the sequence up to itself. Whole pages before the first document are an
    entry, too: an exact one, in the request's own namespace.

    Methods that look first run up to three passes: what is missing is encoded, the look, and the fused rows. Behind a
    `DenseLook`, fused rows read in layer 1 what it computed there for all rows; rows that are decoded later read the
    stored KV.
    """

    name = "fusion"
    steady = False
    counted = ("encoded_documents", "fused_rows")

    def __init__(self, cache: PagedCache, executor: Executor, model: ModelInfo):
        super().__init__(cache, executor.spec.num_layers)
        self._executor, self._model = executor, model
        self._choices = Choices()

    # -- what is asked ---------------------------------------------------------------------------------------

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        if request.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts whose documents are reused have no log-probabilities", param="reuse")
        tokens = read_tokens(request.sequence.tokens.tobytes(), self._model.vocab_size, "the prompt")
        layout = self._layout(tokens, asked, request.namespace)
        method = METHODS[layout.asked.select](layout)
        looks = method.look is not None or layout.asked.keep_tokens is not None
        if looks and self._executor.spec.num_kv_heads != self.cache.pool.k.shape[2]:
            raise InvalidRequest(f"method {method.name!r} is not served by several ranks", param="reuse.method")
        entries = {place.entry.namespace: place.entry for place in layout.places}
        request.reuse = Fused([*entries.values()], layout=layout, method=method, namespace=request.namespace)
        if (layout.asked.keep_tokens or len(tokens)) < len(layout.candidates):
            request.reuse.snap = SnapKV(layout, self._executor)
        if method.look is None:
            self._select(request, method.choose(None), len(tokens))
        elif not method.count():
            self._select(request, _NO_ROWS, len(tokens))
        else:
            self._arrange(request, _NO_ROWS)
            self._recall(request)
        self._fit(request)

    def _layout(self, tokens: array[int], asked: dict[str, Any], namespace: Namespace) -> Layout:
        found = Asked.read(asked, len(tokens))
        if found.select not in METHODS:
            raise InvalidRequest(f"no method {found.select!r}", param="reuse.method")
        chunks, prefix = list(found.chunks()), self.cache.page_size * (found.documents[0][0] // self.cache.page_size)
        if (most := self.cache.pool.num_pages) < len(chunks):  # each takes a page
            raise InvalidRequest(
                f"the documents have {len(chunks)} chunks; the KV pool has {most} pages",
                param="reuse",
                code="context_length_exceeded",
            )
        moved = found.select != "full" or found.variant == "cat"
        places = [self._place(tokens, chunk, namespace, moved) for chunk in chunks]
        if prefix:
            places.insert(0, self._place(tokens, (0, prefix, "prefix"), namespace, False, False))
        last = len(tokens) - 1
        if METHODS[found.select].reuses_question and found.documents[-1][1] < last:
            question = (found.documents[-1][1], last, "question")
            places.append(self._place(tokens, question, namespace, moved, False))
        return Layout(np.frombuffer(tokens, dtype=np.int32), places, found, self.cache.page_size)

    def _place(
        self,
        tokens: array[int],
        chunk: tuple[int, int, str],
        namespace: Namespace,
        moved: bool,
        is_document: bool = True,
    ) -> Place:
        start, stop, name = chunk
        mine, kept = tokens[start:stop], np.ones(stop - start, dtype=bool)
        if start or is_document:
            namespace = namespace.for_entry("document", _digest(mine.tobytes()))
        entry = Entry(name, Own(mine), kept, namespace, self.cache.page_size)
        return Place(entry, start, start if moved else 0, is_document, kept)

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        """One for each chunk."""
        entries = [p.entry for p in self._layout(tokens, asked, namespace).places if p.is_document]
        return [Run(array("i", e.key), e.namespace, e.name) for e in {e.namespace: e for e in entries}.values()]

    def _fit(self, request: Request) -> None:
        """Bound the output of a request that does not; InvalidRequest if it could never have its pages."""
        pool, pages_for, fused = self.cache.pool, self.cache.pages_for, request.reuse
        others = sum(pages_for(entry.length) for entry in fused.entries) + self._look_pages(fused)
        others += fused.snap.num_pages if fused.snap else 0
        if request.sampling.max_new_tokens is None:
            most = (pool.num_pages - others) * pool.page_size
            request.max_tokens = max(min(request.max_tokens, most), request.prompt_len + 1)
        if others + pages_for(request.max_tokens) > pool.num_pages:
            raise InvalidRequest(
                f"documents and the choice of their rows take {others} pages of {pool.page_size} tokens, and other "
                f"text and output {pages_for(request.max_tokens)} more; the KV pool has {pool.num_pages}",
                param="prompt",
                code="context_length_exceeded",
            )

    def _look_pages(self, fused: Fused) -> int:
        """Pages for a look and for rows that it may choose."""
        if fused.method.look is None or not (count := fused.method.count()):
            return 0
        own = fused.method.look.length(fused.layout) if fused.method.look.writes_pages else 0
        return self.cache.pages_for(own) + self.cache.pages_for(count)

    # -- which rows are computed -----------------------------------------------------------------------------

    def _arrange(self, request: Request, chosen: np.ndarray) -> None:
        """Make a sequence of own rows and chosen ones."""
        fused = request.reuse
        layout, sequence = fused.layout, request.sequence
        rows = layout.computed(chosen)
        limit = request.max_tokens - request.prompt_len
        sequence.tokens = array("i", layout.prompt[rows].tobytes())
        sequence.anchors = _anchors(rows)
        sequence.start, sequence.num_computed = 0, 0
        request.prompt_len = len(rows)
        request.max_tokens = len(rows) + limit
        is_read = np.ones(len(layout.prompt), dtype=bool)
        is_read[rows] = False
        request.entry_tokens = array("i", layout.prompt[is_read].tobytes())
        layout.keep(rows)
        # Nothing is committed before rows are chosen; who asks the same waits for the choice.
        fused.num_fused = len(rows)
        request.namespace = fused.namespace.for_entry("fused", _digest(layout.prompt.tobytes()))

    def _select(self, request: Request, chosen: np.ndarray, chosen_for: int) -> None:
        """Let rows be computed that were chosen for so many tokens of the prompt."""
        fused = request.reuse
        self._arrange(request, chosen)
        fused.selected, fused.selected_for = chosen, chosen_for
        fused.num_fused = int(np.searchsorted(fused.layout.computed(chosen), chosen_for))
        places = [(_digest(place.entry.key), place.start, place.shift) for place in fused.layout.places]
        # Behind a dense look, rows up to there read other KV than those that follow.
        until = chosen_for if self._is_dense(fused) else 0
        # A last row that lies in a document is computed for its logits: here, but not in a longer prompt.
        forced = len(fused.layout.prompt) if fused.layout.asked.documents[-1][1] == len(fused.layout.prompt) else 0
        content = msgspec.msgpack.encode((places, chosen.tobytes(), until, forced))
        request.namespace = fused.namespace.for_entry("fused", _digest(content))

    def _recall(self, request: Request) -> None:
        """Take the rows that were chosen for the prompt before, or for that of an earlier turn."""
        fused = request.reuse
        if (choice := self._choices.recall(fused.layout, fused.namespace)) is not None:
            self._select(request, *choice)

    def _is_dense(self, fused: Fused) -> bool:
        return fused.method.look is DenseLook and fused.method.count() > 0

    # -- what exists -----------------------------------------------------------------------------------------

    def find(self, request: Request) -> Found:
        fused = request.reuse
        if fused.selected is None:
            self._recall(request)
        found = super().find(request)
        return Found(self._num_there(fused, *found.detail), found.detail)

    def _num_there(self, fused: Fused, own: Found, matches: Sequence[Match]) -> int:
        """Tokens that need not be computed; a row of a document that was computed again, too, counts once."""
        there = {e.namespace for e, match in zip(fused.entries, matches, strict=True) if self._all(e, match)}
        is_there = np.zeros(len(fused.layout.prompt), dtype=bool)
        for place in fused.layout.places:
            if place.entry.namespace in there:
                is_there[place.start : place.start + place.entry.length] = True
        computed = fused.layout.computed(fused.chosen)
        is_there[computed[: own.tokens]] = True
        return int(is_there.sum()) + max(own.tokens - len(computed), 0)

    def _most(self, request: Request) -> int:
        """The rows that tell what stays are computed, if that is not known."""
        fused, most = request.reuse, super()._most(request)
        if fused.snap is None or fused.snap.kept is not None:
            return most
        return min(most, request.prompt_len - fused.snap.window)

    def _there(self, request: Request, entry: Entry, pages: array[int]) -> None:
        for place in request.reuse.layout.places:
            if place.entry.namespace == entry.namespace:
                place.found(pages)

    def _meta(self, request: Request, entry: Entry) -> DocumentMeta | None:
        return DocumentMeta(entry.name, entry.length) if entry.namespace.entry else None

    def meta_of(self, namespace: Namespace, described: dict[str, Any]) -> DocumentMeta | None:
        if not namespace.entry.startswith("document:"):
            return None
        return DocumentMeta(described["document"], described["document_tokens"])

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        fused = request.reuse
        look = fused.method.look if self._must_look(fused, found.detail[0]) else None
        num_pages = self._look_pages(fused) if look else 0
        num_kept = fused.snap.num_pages if fused.snap else 0
        fused.layout.keep(fused.layout.computed(fused.chosen))
        if not super().admit(request, found, headroom + num_pages + num_kept):
            return False
        pages = self.cache.allocate(num_pages + num_kept, array("i"), request.owner, cached=0)
        assert pages is not None, "the room was counted above"
        if fused.snap is not None:
            fused.snap.pages = Segment(pages[num_pages:], 0)
            request.segments.append(fused.snap.pages)
        if look is not None:
            own = self.cache.pages_for(look.length(fused.layout)) if look.writes_pages else 0
            fused.held = [Segment(pages[:own], 0), Segment(pages[own:num_pages], 0)]
            request.segments += fused.held
            fused.look = look(fused.layout, request.sequence, pages[:own], self._executor)
            request.owed += fused.look.num_rows
        self._snap(request)
        return True

    def grow(self, request: Request, ahead: int = 0) -> bool:
        """No token is computed ahead before it is known what it reads."""
        snap = request.reuse.snap
        return (not ahead or snap is None or snap.is_done) and super().grow(request, ahead)

    def _must_look(self, fused: Fused, own: Found) -> bool:
        if fused.selected is None:
            return True
        return self._is_dense(fused) and own.tokens < fused.num_fused

    # -- passes ----------------------------------------------------------------------------------------------

    def _looks(self, fused: Fused) -> bool:
        return fused.look is not None and not fused.encodings and fused.look.done < fused.look.num_rows

    def work(self, request: Request, limit: int) -> Work:
        fused, done = request.reuse, request.sequence.num_computed
        if self._looks(fused):
            count = min(fused.look.num_rows - fused.look.done, limit)
            return Work(request, fused.look.done, count, count)
        if not fused.encodings:
            for cut in (fused.num_fused, request.prompt_len):  # rows behind read other KV
                limit = min(limit, cut - done) if done < cut else limit
        return super().work(request, limit)

    def rows(self, work: Work) -> list[RowSet]:
        fused = work.request.reuse
        if self._looks(fused):
            return [fused.look.rows(work.start, work.start + work.count)]
        return super().rows(work)

    def _stages(self, request: Request, first: int, stop: int) -> list[Stage]:
        fused, sequence, page_size = request.reuse, request.sequence, self.cache.page_size
        positions = sequence.positions(first, stop)
        writes = sequence.slots(first, stop, page_size)
        reads = [read for place in fused.layout.places for read in place.reads(positions, page_size)]
        own = _own_read(request, first, stop, page_size)
        if not isinstance(fused.look, DenseLook) or first >= fused.num_fused:
            stages = [Stage(range(self.num_layers), writes, [*reads, own])]
            return self._saving(fused, stages, positions)
        before = [r for place in fused.layout.places if place.is_exact for r in place.reads(positions, page_size)]
        stages = [
            Stage(range(1), writes, [*reads, own]),
            Stage(range(1, 2), writes, [*before, fused.look.read(positions)]),
            Stage(range(2, self.num_layers), writes, [*reads, own]),
        ]
        return self._saving(fused, stages, positions)

    def _saving(self, fused: Fused, stages: list[Stage], positions: np.ndarray) -> list[Stage]:
        if fused.snap is None or fused.snap.kept is not None:
            return stages
        return fused.snap.save(stages, positions)

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request = work.request
        fused = request.reuse
        if self._looks(fused):
            fused.look.take(work.start, work.start + work.count, saved[0])
            fused.look.done += work.count
            request.owed -= work.count
            if not self._looks(fused):
                self._choose(request)
            return False
        encodes, before = bool(fused.encodings), request.sequence.num_computed
        positions = _NO_ROWS if encodes else request.sequence.positions(before, before + work.count)
        has_logits = super().book(work, saved, seconds)
        if fused.look is not None and before < fused.num_fused <= request.sequence.num_computed:
            self._end_look(request)
        if fused.snap is not None:
            if not encodes:
                fused.snap.take(saved[0], positions)
            self._snap(request)
        return has_logits

    def _commit(self, request: Request) -> None:
        """Rows that were computed when only some document rows had stayed are nobody else's."""
        if request.reuse.snap is None or request.sequence.num_computed <= request.prompt_len:
            super()._commit(request)

    def _snap(self, request: Request) -> None:
        """Leave the documents, once the prompt is computed, but for the rows that stay."""
        fused, sequence = request.reuse, request.sequence
        if fused.snap is None or fused.snap.is_done or fused.encodings or sequence.num_computed < request.prompt_len:
            return
        pages = request.segments[0].pages + sequence.pages if sequence.start else sequence.pages
        fused.snap.choose(sequence.positions(0, request.prompt_len), pages)
        left = {id(place.pages) for place in fused.layout.places if place.is_document}
        fused.snap.move(self.cache)
        for segment in request.segments:
            if id(segment.pages) in left:
                self.cache.leave(segment)
        request.segments = [segment for segment in request.segments if id(segment.pages) not in left]

    def _choose(self, request: Request) -> None:
        """Choose rows after a look; those that a retracted request has chosen before stay."""
        fused, sequence = request.reuse, request.sequence
        if fused.selected is None:
            chosen = fused.method.choose(fused.look)
            if request.store:
                self._choices.keep(fused.layout, fused.namespace, chosen)
            self._select(request, chosen, len(fused.layout.prompt))
            sequence.pages = sequence.pages + fused.held[1].pages  # a plan may still read the old ones
            request.segments.remove(fused.held.pop())
            self.counters["fused_rows"] += len(chosen)
        if not isinstance(fused.look, DenseLook):
            self._end_look(request)

    def _end_look(self, request: Request) -> None:
        fused = request.reuse
        for segment in fused.held:
            self.cache.leave(segment)
            request.segments.remove(segment)
        fused.look, fused.held = None, []

    def release(self, request: Request, keep: bool) -> None:
        super().release(request, keep)
        fused = request.reuse
        fused.look, fused.held = None, []
        if fused.snap is not None:
            fused.snap.leave()

    def flush(self) -> None:
        self._choices.clear()

    def report(self, request: Request) -> dict[str, Any] | None:
        """With the first token: nothing of it changes later."""
        if request.num_output > 1:
            return None
        fused = request.reuse
        asked, reused = fused.layout.asked, max(request.cached_tokens, 0)
        missing = {entry.namespace for entry in fused.computed}
        documents = [place.entry for place in fused.layout.places if place.is_document]
        return {
            "strategy": self.name,
            "exact": False,
            "method": asked.select,
            **asked.options(),
            "documents": list(dict.fromkeys(entry.name for entry in documents)),
            "computed_documents": list(dict.fromkeys(e.name for e in documents if e.namespace in missing)),
            "reused_tokens": reused,
            "computed_tokens": request.num_prompt - reused,
            "chosen_before": 0 < fused.selected_for < len(fused.layout.prompt),
            "recomputed_rows": len(fused.chosen),
            "row_layers": request.row_layers,
            **({"kept_tokens": fused.snap.num_kept} if fused.snap is not None else {}),
        }


def _own_read(request: Request, first: int, stop: int, page_size: int) -> Read:
    """The sequence, as far as each of its rows sees it."""
    sequence = request.sequence
    pages = sequence.pages[: -(-(stop - sequence.start) // page_size)]
    if sequence.start:
        pages = request.segments[0].pages + pages
    return Read(np.frombuffer(pages, dtype=np.int32), stop, visible=causal_visible(stop, stop - first))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _anchors(rows: np.ndarray) -> Pairs:
    """Anchors of a sequence of rows of the prompt, whose output follows behind the last one."""
    jumps = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    return list(zip(jumps.tolist(), rows[jumps].tolist(), strict=True))
