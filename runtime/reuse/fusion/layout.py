"""The layout of a prompt with documents: which rows are read from entries, and which rows are computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.asks import DocumentsAsk
from runtime.batch import Read
from runtime.reuse.entries.entry import Entry

# Only the last rows of a longer question choose document rows, so that the choice does not delay other requests.
LONGEST_QUESTION = 512


def titles_of(ask: DocumentsAsk) -> list[str]:
    """A name for each document."""
    return ask.names or [f"document {i + 1}" for i in range(len(ask.documents))]


def chunks_of(ask: DocumentsAsk) -> Iterator[tuple[int, int, str]]:
    """The chunks as (start, stop, name of the document); each is a range of the prompt that is encoded alone."""
    for (start, stop), name in zip(ask.documents, titles_of(ask), strict=True):
        for at in range(start, stop - ask.shortest + 1, ask.chunk_tokens):
            yield at, min(at + ask.chunk_tokens, stop), name


@dataclass(slots=True, eq=False)
class EntryPlace:
    """A range of the prompt whose KV is read from an entry.

    Attributes:
        start: index of the entry's first row in the prompt; also the shift of its keys, which were encoded from 0 on.
        is_document: whether the method may choose rows of it.
        kept: bool [length], false for rows that are computed again and therefore not read.
        pages: int32 page ids of the whole entry; empty until it is encoded.
    """

    entry: Entry
    start: int
    is_document: bool
    kept: np.ndarray
    pages: array[int] = field(default_factory=lambda: array("i"))
    _thinned: tuple[Read, np.ndarray] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the entry is the exact prefix before all documents."""
        return not self.entry.namespace.entry

    def keep(self, kept: np.ndarray) -> None:
        self.kept, self._thinned = kept, None

    def set_pages(self, pages: array[int]) -> None:
        self.pages, self._thinned = pages, None

    def reads(self, positions: np.ndarray, page_size: int) -> Iterator[Read]:
        """At most one read: queries at ascending positions, int64 [n], see the kept rows before their position."""
        if self._thinned is None:
            self._thinned = self._thin(page_size)
        whole, rows = self._thinned
        seen = np.searchsorted(rows, positions)
        length, blind = int(seen[-1]), int(np.searchsorted(seen, 1))
        if blind == len(seen):
            return
        yield Read(
            pages=whole.pages[: -(-length // page_size)],
            length=length,
            shift=self.start,
            keep=None if whole.keep is None else whole.keep[:length],
            visible=None if seen[blind] == length else seen[blind:].astype(np.int32),
            rows=slice(blind, None) if blind else None,
        )

    def _thin(self, page_size: int) -> tuple[Read, np.ndarray]:
        """A read of the pages with kept rows, up to the last kept row, and the prompt index of each row, int64."""
        kept = np.flatnonzero(self.kept)
        pages = np.unique(kept // page_size)
        rows = (pages[:, None] * page_size + np.arange(page_size)).ravel()
        rows = rows[: np.searchsorted(rows, kept[-1:], side="right").sum()]
        mask = self.kept[rows]
        table = np.frombuffer(self.pages, dtype=np.int32)[pages]
        keep = None if mask.all() else torch.from_numpy(mask)
        return Read(table, len(rows), self.start, keep), self.start + rows


@dataclass(slots=True, eq=False)
class Layout:
    """A prompt with documents.

    Attributes:
        prompt: int32 [n], all tokens of the prompt.
        places: the entries in the order of the prompt. The first may be the exact prefix before all documents.
        is_own: bool [n], rows that are computed with any choice.
        num_prefix: number of tokens of the exact prefix.
        candidates: int64, the document rows from which a method chooses, ascending.
        pages: int64, the page of each candidate. Pages with candidates are numbered from 0 over the whole prompt.
    """

    prompt: np.ndarray
    places: Sequence[EntryPlace]
    ask: DocumentsAsk
    page_size: int
    is_own: np.ndarray = field(init=False)
    num_prefix: int = field(init=False)
    candidates: np.ndarray = field(init=False)
    pages: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.is_own = np.ones(len(self.prompt), dtype=bool)
        rows, pages, at = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
        for place in self.places:
            self.is_own[place.start : place.start + place.entry.length] = False
            if place.is_document:
                own = np.arange(place.entry.length)
                rows.append(place.start + own)
                pages.append(at + own // self.page_size)
                at = int(pages[-1][-1]) + 1
        self.is_own[-1] = True  # its logits give the first token
        candidates, pages_of = np.concatenate(rows), np.concatenate(pages)
        free = ~self.is_own[candidates]
        self.candidates, self.pages = candidates[free], np.unique(pages_of[free], return_inverse=True)[1]
        first = self.places[0]
        self.num_prefix = first.entry.length if first.is_exact else 0

    @property
    def question(self) -> int:
        """The first row of the question: the last `LONGEST_QUESTION` rows after the documents, at least one row."""
        return min(max(self.ask.documents[-1][1], len(self.prompt) - LONGEST_QUESTION), len(self.prompt) - 1)

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
            place.keep(is_kept[place.start : place.start + place.entry.length])
