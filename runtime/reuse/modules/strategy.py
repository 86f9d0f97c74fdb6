"""The `modules` strategy (Prompt Cache): requests read entries that were encoded alone, wherever these lie."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from radix import Match, Namespace, Node
from runtime.errors import InvalidRequest
from runtime.kv.cache import PagedCache
from runtime.protocol import ModelInfo
from runtime.request import Request, Segment, Work, slots_of
from runtime.reuse.build import Read, RowSet, Stage
from runtime.reuse.modules.entry import Entry, Layout, ModuleMeta, Pairs, read_anchors, read_entry, read_tokens
from runtime.reuse.prefix import PrefixStrategy
from runtime.reuse.strategy import Found, Run

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Encoding:
    """An entry that a request encodes.

    Attributes:
        start: the row at which the request begins: those before lie in the tree.
        at: rows of other entries that the request encodes before.
        pages: int32 page ids of the rows that are kept, those in the tree first.
        scratch: of the placeholder rows; freed when the entry is complete.
        held: what keeps these pages for the request meanwhile.
        seconds: what the rows took so far.
    """

    entry: Entry
    start: int
    at: int
    pages: array[int]
    scratch: array[int]
    held: list[Segment]
    seconds: float = 0.0


@dataclass(slots=True)
class Imports:
    """A request's entries, and those that it encodes itself, of which the first `done` rows are encoded.

    Attributes:
        schema: for people.
        computed: names of the entries that were missing when the request was first admitted.
    """

    schema: str
    entries: list[Entry]
    encodings: list[Encoding] = field(default_factory=list)
    done: int = 0
    computed: list[str] = field(default_factory=list)

    def parts(self, work: Work) -> Iterator[tuple[Encoding, int, int]]:
        """The rows of entries, as ranges, that a piece of work encodes."""
        for one in self.encodings:
            shift, length = one.start - one.at, len(one.entry.is_kept)
            first, stop = max(work.start + shift, one.start), min(work.start + work.count + shift, length)
            if first < stop:
                yield one, first, stop


class Modules(PrefixStrategy):
    """Entries are found by their content; the first request that reads a missing one encodes it.

    An entry is encoded alone: causal among its own rows, at its own positions. Rows of placeholders go to scratch
    pages, the others side by side into whole pages, so that nobody who reads them needs a mask.

    A request's own tokens are a prefix as those of `PrefixStrategy`, in a namespace of the entries that it reads and
    of its anchors. Its segments are this prefix, if there is one, and its entries.
    """

    name = "modules"
    counted = ("encoded_modules",)

    def __init__(self, cache: PagedCache, num_layers: int, model: ModelInfo):
        super().__init__(cache, num_layers)
        self._model = model

    # -- what is asked ---------------------------------------------------------------------------------------

    def open(self, request: Request, asked: dict[str, Any]) -> None:
        """A request without tokens of its own only encodes."""
        layout = Layout.read(asked)
        entries = self._entries(layout, request.namespace)
        own, anchors = request.sequence, layout.anchors
        if request.prompt_logprobs_from is not None:
            raise InvalidRequest("prompts with modules have no log-probabilities", param="prompt_logprobs")
        if not own.tokens:
            anchors = self._probe(request, entries)
        read_tokens(own.tokens.tobytes(), self._model.vocab_size, "the prompt")
        own.anchors = read_anchors(anchors, len(own.tokens), self._model.context_length, "the prompt")
        request.reuse = Imports(layout.schema, entries)
        for entry in entries:
            request.entry_tokens.extend(entry.tokens)
        request.namespace = _own_namespace(request.namespace, entries, own.anchors)
        self._fit(request, entries)

    def _entries(self, layout: Layout, namespace: Namespace) -> list[Entry]:
        if (most := self.cache.pool.num_pages) < len(layout.entries):  # each takes a page, and some time to be read
            raise InvalidRequest(
                f"there are {len(layout.entries)} modules; the KV pool has {most} pages",
                param="reuse",
                code="context_length_exceeded",
            )
        found: dict[Namespace, Entry] = {}
        for fields in layout.entries:
            entry = read_entry(fields, namespace, self._model)
            if entry is not None and found.setdefault(entry.namespace, entry) is not entry:
                raise InvalidRequest(f"entry {entry.name!r} is imported twice", param="reuse")
        # The same order in all requests, the longest first: those that read the same are neighbours in a step.
        return sorted(found.values(), key=lambda entry: (-entry.length, entry.namespace))

    def _probe(self, request: Request, entries: list[Entry]) -> Pairs:
        """Give a request one token, whose logits show that its entries are numbers; returns its anchors."""
        if not entries or request.wants_tokens:
            raise InvalidRequest("the prompt has no tokens of its own", param="prompt")
        last = entries[-1].sequence
        request.sequence.tokens.append(last.tokens[-1])
        request.prompt_len = request.max_tokens = 1
        return [(0, last.position(len(last.tokens) - 1))]

    def _fit(self, request: Request, entries: list[Entry]) -> None:
        """Bound the output of a request that does not; InvalidRequest if it could never have its pages."""
        pool, pages_for = self.cache.pool, self.cache.pages_for
        entry_pages = sum(pages_for(entry.length) + pages_for(entry.num_holes) for entry in entries)
        if request.sampling.max_new_tokens is None:
            own = request.sequence
            in_pool = (pool.num_pages - entry_pages) * pool.page_size
            in_context = self._model.context_length - own.position(len(own.tokens)) + len(own.tokens)
            request.max_tokens = max(min(in_pool, in_context), len(own.tokens) + 1)
        if entry_pages + pages_for(request.max_tokens) > pool.num_pages:
            raise InvalidRequest(
                f"the modules take {entry_pages} pages of {pool.page_size} tokens, and prompt and output "
                f"{pages_for(request.max_tokens)} more; the KV pool has {pool.num_pages}",
                param="prompt",
                code="context_length_exceeded",
            )

    def runs(self, tokens: array[int], namespace: Namespace, asked: dict[str, Any]) -> list[Run]:
        """One for each entry."""
        entries = self._entries(Layout.read(asked), namespace)
        return [Run(array("i", e.key), e.namespace, e.name) for e in entries]

    # -- which entries exist ---------------------------------------------------------------------------------

    def find(self, request: Request) -> Found:
        """`detail`: the match of the request's own tokens, and those of its entries."""
        own = super().find(request)
        matches = [self._match(entry) for entry in request.reuse.entries]
        whole = sum(e.length for e, match in zip(request.reuse.entries, matches, strict=True) if self._all(e, match))
        return Found(own.tokens + whole, (own, matches))

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
        missing = [(entry, self._start(entry, match)) for entry, match in pairs if not self._all(entry, match)]
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
            imports.computed = _names(entry for entry, _ in missing)
        for (entry, match), node in zip(pairs, nodes, strict=True):
            cache.tree.use(node)
            if self._all(entry, match):
                request.segments.append(Segment(match.pages, entry.length, node=node))
            else:
                fresh = self._begin(request, entry, match, node, fresh)
        return True

    def _start(self, entry: Entry, match: Match) -> int:
        """The row at which an entry is encoded: behind its whole pages in the tree, if none of them has a hole."""
        page_size = self.cache.page_size
        return min(len(match.pages), entry.before_holes // page_size) * page_size

    def _begin(self, request: Request, entry: Entry, match: Match, node: Node | None, fresh: array[int]) -> array[int]:
        """Let a request encode an entry, in the first of some fresh pages; returns the others."""
        start = self._start(entry, match)
        before = match.pages[: start // self.cache.page_size]
        kept = self.cache.pages_for(entry.length) - len(before)
        size = kept + self.cache.pages_for(entry.num_holes)
        held = [Segment(fresh[:size], 0)]
        if node is not None:
            held.append(Segment(before, 0, node=node))
        request.segments += held
        pages, scratch = before + fresh[:kept], fresh[kept:size]
        request.reuse.encodings.append(Encoding(entry, start, request.owed, pages, scratch, held))
        request.owed += len(entry.is_kept) - start
        return fresh[size:]

    def work(self, request: Request, limit: int) -> Work:
        """Entries come first, as many in one step as there is room for."""
        if not request.owed:
            return super().work(request, limit)
        count = min(request.owed, limit)
        return Work(request, request.reuse.done, count, count)

    def rows(self, work: Work) -> list[RowSet]:
        if not work.request.owed:
            return super().rows(work)
        return [self._encode(*part) for part in work.request.reuse.parts(work)]

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
            logits=_NO_ROWS,
        )

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        request, imports = work.request, work.request.reuse
        if not request.owed:
            return super().book(work, saved, seconds)
        complete = []
        for one, first, stop in imports.parts(work):
            one.seconds += seconds * (stop - first) / work.count
            if stop == len(one.entry.is_kept):
                complete.append(one)
        self._keep(request, complete)
        imports.done += work.count
        request.owed -= work.count
        return False

    def _keep(self, request: Request, complete: list[Encoding]) -> None:
        """Hand complete entries to the tree, from which the request reads them."""
        imports, known = request.reuse, set(complete)
        imports.encodings = [one for one in imports.encodings if one not in known]
        held = {id(segment) for one in complete for segment in one.held}
        segments = [segment for segment in request.segments if id(segment) not in held]
        request.segments = segments + [self._insert(request, one) for one in complete]
        self.counters["encoded_modules"] += len(complete)

    def _insert(self, request: Request, one: Encoding) -> Segment:
        """The segment of a complete entry; without a cache its pages stay private."""
        cache, entry = self.cache, one.entry
        cache.allocator.release(one.scratch)
        if not cache.enabled:
            return Segment(one.pages, entry.length)
        meta = ModuleMeta(request.reuse.schema, entry.name, entry.length)
        node, pages = cache.insert(entry.key, one.pages, entry.namespace, one.seconds, meta, request.owner)
        cache.tree.lock(node)
        for segment in one.held:
            cache.tree.unlock(segment.node)
        return Segment(pages, entry.length, node=node)

    def release(self, request: Request, keep: bool) -> None:
        super().release(request, keep)
        request.reuse.encodings, request.reuse.done = [], 0

    def report(self, request: Request) -> dict[str, Any] | None:
        """With the first token: nothing of it changes later."""
        if request.num_output > 1:
            return None
        reused = max(request.cached_tokens, 0)
        return {
            "strategy": self.name,
            "exact": True,
            "modules": _names(request.reuse.entries),
            "computed_modules": request.reuse.computed,
            "reused_tokens": reused,
            "computed_tokens": request.num_prompt - reused,
        }


def _names(entries: Iterable[Entry]) -> list[str]:
    """Names in the order of the entries' first kept rows."""
    first = {entry: entry.sequence.position(int(entry.is_kept.argmax())) for entry in entries}
    return [entry.name for entry in sorted(first, key=first.__getitem__)]


def _own_namespace(namespace: Namespace, entries: list[Entry], anchors: Pairs) -> Namespace:
    """The namespace of own rows behind some entries: their KV depends on what they read, and on their positions."""
    content = msgspec.msgpack.encode((sorted(entry.namespace.entry for entry in entries), anchors))
    return namespace.for_entry("rows", hashlib.blake2b(content, digest_size=16).hexdigest())


def _see(pages: array[int], seen: np.ndarray, page_size: int) -> Read:
    """A read of the first rows of some pages; `seen`: int32 [n], ascending, how many of them each row sees."""
    length, blind = int(seen[-1]), int(np.searchsorted(seen, 1))
    table = np.frombuffer(pages, dtype=np.int32)[: -(-length // page_size)]
    visible = seen[blind:] if len(seen) - blind > 1 else None
    return Read(table, length, visible=visible, rows=slice(blind, None) if blind else None)
