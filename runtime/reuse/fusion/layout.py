"""Where a prompt reads entries, and which of its rows are read or computed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from runtime.batch import Read
from runtime.reuse.entries.entry import Entry

# Rows of the question that choose document rows; more of them would hold up all requests.
LONGEST_QUESTION = 512


class Asked(msgspec.Struct):
    """The `reuse` fields of a message, whose ranges the front end has checked.

    Attributes:
        select: name of the method that chooses which rows are computed again.
        documents: ranges [start, stop) of the prompt's tokens, ascending.
        names: of the documents, shown in answers.
        ratio: share of the documents' rows that are computed again; None: the method's own.
        granularity: whether single rows are chosen, or whole pages of them.
        chunk_tokens: longer documents are encoded in pieces of this many tokens.
        k: leading rows of each chunk (LegoLink).
    """

    select: str
    documents: list[tuple[int, int]]
    names: list[str] = []
    ratio: float | None = None
    granularity: Literal["page", "token"] = "page"
    chunk_tokens: int = 512
    k: int = 16

    def options(self) -> dict[str, Any]:
        """The options that the answer repeats; `k` where LegoLink takes it."""
        found = {"ratio": self.ratio, "granularity": self.granularity, "chunk_tokens": self.chunk_tokens}
        return {**found, "k": self.k} if self.select == "legolink" and self.ratio is None else found

    def chunks(self) -> Iterator[tuple[int, int, str]]:
        """Ranges of the prompt that are encoded alone, and the name of the document that each belongs to."""
        names = self.names or [f"document {i + 1}" for i in range(len(self.documents))]
        for (start, stop), name in zip(self.documents, names, strict=True):
            for at in range(start, stop, self.chunk_tokens):
                yield at, min(at + self.chunk_tokens, stop), name


@dataclass(slots=True, eq=False)
class EntryPlace:
    """A run of a prompt's rows that is read from an entry.

    Attributes:
        start: index of the entry's first row in the prompt, and the distance by which its keys are moved.
        is_document: whether rows of it may be computed again.
        kept: bool [length], the rows that are read.
        pages: int32 page ids of the whole entry, once it is there.
    """

    entry: Entry
    start: int
    is_document: bool
    kept: np.ndarray
    pages: array[int] = field(default_factory=lambda: array("i"))
    _thinned: tuple[Read, np.ndarray] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it is the exact prefix before all documents."""
        return not self.entry.namespace.entry

    def keep(self, kept: np.ndarray) -> None:
        self.kept, self._thinned = kept, None

    def set_pages(self, pages: array[int]) -> None:
        self.pages, self._thinned = pages, None

    def reads(self, positions: np.ndarray, page_size: int) -> Iterator[Read]:
        """The kept rows before each of ascending positions int64 [n], as one read, or none."""
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
        """The pages with kept rows, and the rows of the prompt, int64, that lie there, up to the last kept one."""
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
        prompt: int32 [n], all its tokens.
        places: in the order of the prompt. The first one may be the exact prefix before all documents.
        is_own: bool [n], rows that are computed whatever is chosen.
        num_prefix: tokens of the exact prefix.
        candidates: int64, the document rows among which a method chooses, ascending.
        pages: int64, the page of each candidate; pages with candidates are numbered from 0 over the whole prompt.
    """

    prompt: np.ndarray
    places: Sequence[EntryPlace]
    asked: Asked
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
        self.is_own[-1] = True  # its logits are wanted
        candidates, pages_of = np.concatenate(rows), np.concatenate(pages)
        free = ~self.is_own[candidates]
        self.candidates, self.pages = candidates[free], np.unique(pages_of[free], return_inverse=True)[1]
        first = self.places[0]
        self.num_prefix = first.entry.length if first.is_exact else 0

    @property
    def question(self) -> int:
        """The first row of the question: all rows behind the last document, up to a bound; the last row at least."""
        return min(max(self.asked.documents[-1][1], len(self.prompt) - LONGEST_QUESTION), len(self.prompt) - 1)

    def computed(self, chosen: np.ndarray) -> np.ndarray:
        """The rows of the prompt, int64 ascending, that a request computes if some rows are chosen."""
        is_computed = self.is_own.copy()
        is_computed[chosen] = True
        return np.flatnonzero(is_computed)

    def keep(self, computed: np.ndarray) -> None:
        """Let places be read without the rows that are computed."""
        is_kept = np.ones(len(self.prompt), dtype=bool)
        is_kept[computed] = False
        for place in self.places:
            place.keep(is_kept[place.start : place.start + place.entry.length])
