"""The layout of a prompt with chunks: which rows are read from entries, and which rows are computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from radix import Namespace
from runtime.batch import Read
from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import ChunksAsk, Pairs
from runtime.features.chunks.entry import Entry, digest, read_anchors, read_module
from runtime.kv.segments import Sequence as Own
from runtime.protocol import ModelInfo

# Only the last rows of a longer question choose rows, so that the choice does not delay other requests.
LONGEST_QUESTION = 512
_NO_LEAD = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Place:
    """Rows of the prompt whose KV is read from an entry.

    Attributes:
        rows: int64 [length], ascending, the entry's kept rows as rows of the prompt.
        positions: int64 [length], their positions.
        shift: distance to these positions from those at which the entry is encoded; may be negative.
        is_chunk: whether the method may choose rows of it.
        kept: bool [length], false for rows that are computed again and therefore not read.
        pages: int32 page ids of the whole entry; empty until it is encoded.
    """

    entry: Entry
    rows: np.ndarray
    positions: np.ndarray
    shift: int = 0
    is_chunk: bool = True
    kept: np.ndarray = field(init=False)
    pages: array[int] = field(default_factory=lambda: array("i"))
    _thinned: tuple[Read, np.ndarray] | None = None

    def __post_init__(self) -> None:
        self.kept = np.ones(len(self.rows), dtype=bool)

    @property
    def is_exact(self) -> bool:
        """Whether the entry is the exact prefix before all documents."""
        return not self.entry.namespace.entry

    @property
    def begins(self) -> bool:
        """Whether the entry is the beginning of the prompt, and nothing else, so that its rows are exact."""
        return int(self.rows[-1]) == len(self.rows) - 1 and not self.entry.num_holes

    def keep(self, kept: np.ndarray) -> None:
        self.kept, self._thinned = kept, None

    def set_pages(self, pages: array[int]) -> None:
        self.pages, self._thinned = pages, None

    def reads(self, positions: np.ndarray, page_size: int) -> Iterator[Read]:
        """At most one read: queries at ascending positions, int64 [n], see the kept rows before their position."""
        if self._thinned is None:
            self._thinned = self._thin(page_size)
        whole, places = self._thinned
        seen = np.searchsorted(places, positions)
        length, blind = int(seen[-1]), int(np.searchsorted(seen, 1))
        if blind == len(seen):
            return
        yield Read(
            pages=whole.pages[: -(-length // page_size)],
            length=length,
            shift=self.shift,
            keep=None if whole.keep is None else whole.keep[:length],
            visible=None if seen[blind] == length else seen[blind:].astype(np.int32),
            rows=slice(blind, None) if blind else None,
        )

    def _thin(self, page_size: int) -> tuple[Read, np.ndarray]:
        """A read of the pages with kept rows, up to the last kept row, and the position of each row, int64."""
        kept = np.flatnonzero(self.kept)
        pages = np.unique(kept // page_size)
        rows = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        rows = rows[: np.searchsorted(rows, kept[-1:], side="right").sum()]
        mask = self.kept[rows]
        table = np.frombuffer(self.pages, dtype=np.int32)[pages]
        keep = None if mask.all() else torch.from_numpy(mask)
        return Read(table, len(rows), self.shift, keep), self.positions[rows]


@dataclass(slots=True, eq=False)
class Layout:
    """A prompt with chunks.

    Attributes:
        prompt: int32 [n], all tokens of the prompt, by position.
        positions: int64 [n], ascending.
        places: what is read from entries. The first may be the exact prefix before all documents.
        end: number of rows up to the end of the last document or module.
        is_own: bool [n], rows that are computed with any choice.
        num_prefix: number of tokens of the exact prefix.
        candidates: int64, the rows of chunks from which a method chooses, ascending.
        pages: int64, the page of each candidate. Pages with candidates are numbered from 0 over the whole prompt.
    """

    prompt: np.ndarray
    positions: np.ndarray
    places: list[Place]
    ask: ChunksAsk
    page_size: int
    end: int
    is_own: np.ndarray = field(init=False)
    num_prefix: int = field(init=False)
    candidates: np.ndarray = field(init=False)
    pages: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.is_own = np.ones(len(self.prompt), dtype=bool)
        page_of, first_page = np.full(len(self.prompt), -1), 0
        for place in self.places:
            self.is_own[place.rows] = False
            if place.is_chunk:
                page_of[place.rows] = first_page + np.arange(len(place.rows)) // self.page_size
                first_page += -(-len(place.rows) // self.page_size)
        self.is_own[-1:] = True  # its logits give the first token
        self.candidates = np.flatnonzero((page_of >= 0) & ~self.is_own)
        self.pages = np.unique(page_of[self.candidates], return_inverse=True)[1]
        self.num_prefix = sum(place.entry.length for place in self.places if place.is_exact)

    @property
    def is_exact(self) -> bool:
        """Whether rows that are not computed again are as in an ordinary prompt: the beginning of it, encoded as such.

        False if positions are left out.
        """
        read = [place for place in self.places if place.kept.any()]
        return all(place.begins for place in read) and int(self.positions[-1]) == len(self.positions) - 1

    @property
    def question(self) -> int:
        """The first row of the question: the last `LONGEST_QUESTION` rows after the chunks, at least one row."""
        return min(max(self.end, len(self.prompt) - LONGEST_QUESTION), len(self.prompt) - 1)

    def computed(self, chosen: np.ndarray) -> np.ndarray:
        """The prompt rows that a request computes with a choice of rows: own and chosen rows, int64 ascending."""
        is_computed = self.is_own.copy()
        is_computed[chosen] = True
        return np.flatnonzero(is_computed)

    def keep(self, computed: np.ndarray) -> None:
        """Exclude computed rows, int64, from the reads of all places."""
        is_kept = np.ones(len(self.prompt), dtype=bool)
        is_kept[computed] = False
        for place in self.places:
            place.keep(is_kept[place.rows])


def lay_out(
    tokens: array[int], ask: ChunksAsk, namespace: Namespace, model: ModelInfo, reuses_question: bool = False
) -> Layout:
    """The layout of a message with the int32 tokens of a prompt. Raises InvalidRequest.

    `reuses_question`: see `Method`.
    """
    page_size = model.page_size
    if ask.documents:
        prompt, positions = np.frombuffer(tokens, dtype=np.int32), np.arange(len(tokens))
        places, end = _documents(prompt, ask, namespace, model), ask.documents[-1][1]
    else:
        prompt, positions, places = _modules(tokens, ask, namespace, model)
        end = max((int(place.rows[-1]) + 1 for place in places), default=0)
    if reuses_question and end < len(prompt) - 1:
        places.append(_moved(prompt, positions, end, len(prompt) - 1, "question", namespace, page_size))
    return Layout(prompt, positions, places, ask, page_size, end)


def titles_of(ask: ChunksAsk) -> list[str]:
    """A name for each document."""
    return ask.names or [f"document {i + 1}" for i in range(len(ask.documents))]


def _documents(prompt: np.ndarray, ask: ChunksAsk, namespace: Namespace, model: ModelInfo) -> list[Place]:
    """The places of chunks, and of the whole pages before the first document, which are an exact prefix.

    With its lead, a chunk must fit into the context.
    """
    lead, page_size = np.frombuffer(ask.lead, dtype=np.int32), model.page_size
    places, rows, chunk = [], np.arange(len(prompt)), min(ask.chunk_tokens, model.context_length - len(lead))
    if chunk < ask.shortest:
        raise InvalidRequest(
            f"the model's context of {model.context_length} tokens is too short for method {ask.method!r}",
            param="reuse.method",
        )
    if prefix := ask.documents[0][0] // page_size * page_size:
        sequence, is_kept = Own(array("i", prompt[:prefix].tobytes())), np.ones(prefix, dtype=bool)
        entry = Entry("prefix", sequence, is_kept, namespace, page_size)
        places.append(Place(entry, rows[:prefix], rows[:prefix], is_chunk=False))
    for (start, stop), name in zip(ask.documents, titles_of(ask), strict=True):
        for at in range(start, stop - ask.shortest + 1, chunk):
            until = min(at + chunk, stop)
            places.append(_moved(prompt, rows, at, until, name, namespace, page_size, lead, is_chunk=True))
    return places


def _moved(
    prompt: np.ndarray,
    positions: np.ndarray,
    start: int,
    stop: int,
    name: str,
    namespace: Namespace,
    page_size: int,
    lead: np.ndarray = _NO_LEAD,
    is_chunk: bool = False,
) -> Place:
    """The place of a part of the prompt that is encoded behind `lead`, int32 tokens from position 0 on."""
    tokens, shift = np.concatenate((lead, prompt[start:stop])).tobytes(), int(positions[start]) - len(lead)
    encoded = np.concatenate((np.arange(len(lead)), positions[start:stop] - shift))
    anchors, is_kept = anchors_of(encoded), np.arange(len(encoded)) >= len(lead)
    is_plain = len(anchors) == 1 and not len(lead)
    content = tokens if is_plain else msgspec.msgpack.encode((tokens, anchors, len(lead)))
    space = namespace.for_entry("document", digest(content))
    entry = Entry(name, Own(array("i", tokens), anchors=anchors), is_kept, space, page_size)
    return Place(entry, np.arange(start, stop), positions[start:stop], shift, is_chunk)


def _modules(
    own: array[int], ask: ChunksAsk, namespace: Namespace, model: ModelInfo
) -> tuple[np.ndarray, np.ndarray, list[Place]]:
    """The prompt, its positions, and the places of its modules, by position. `own`: the prompt's own tokens."""
    found: dict[Namespace, Entry] = {}
    for fields in ask.modules:
        entry = read_module(fields, namespace, model)
        if entry is not None and found.setdefault(entry.namespace, entry) is not entry:
            raise InvalidRequest(f"entry {entry.name!r} is imported twice", param="reuse")
    anchors = read_anchors(ask.anchors or [(0, 0)], len(own), model.context_length, "the prompt")
    parts = [(entry.tokens, entry.positions) for entry in found.values()]
    parts.append((own, Own(own, anchors=anchors).positions(0, len(own))))
    positions = np.concatenate([part for _, part in parts])
    order = np.argsort(positions, kind="stable")
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    prompt = np.concatenate([np.frombuffer(tokens, dtype=np.int32) for tokens, _ in parts])
    cuts = np.cumsum([len(tokens) for tokens, _ in parts])
    pairs = zip(found.values(), np.split(ranks, cuts), strict=False)
    places = [Place(entry, rows, entry.positions) for entry, rows in pairs]
    return prompt[order], positions[order], sorted(places, key=lambda place: int(place.rows[0]))


def anchors_of(positions: np.ndarray) -> Pairs:
    """Anchors, pairs (index, position), of a sequence at these ascending positions."""
    jumps = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return list(zip(jumps.tolist(), positions[jumps].tolist(), strict=True))
