"""SnapKV (Li et al. 2024) by whole pages: after the first token, only document rows that the question attends to stay.

The paper chooses rows for each head. A page holds the rows of all layers and heads, so such a choice would free no
memory: here one choice of pages serves them all.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch

from runtime.batch import Stage
from runtime.execution.executor import Executor
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Segment
from runtime.reuse.fusion.layout import Layout
from runtime.reuse.fusion.looks import attention, probed_layers, project_each, save_before, smooth


class SnapKV:
    """The choice for one request.

    Attributes:
        window: how many of the prompt's last rows vote.
        kept: for each place, bool [length], the rows that stay; None: they are not chosen yet.
        pages: private ones, for the rows that stay.
        is_done: whether the request has left the other rows.
    """

    def __init__(self, layout: Layout, executor: Executor):
        self.layout, self._executor = layout, executor
        self.keep_tokens = layout.asked.keep_tokens or 0
        self.window = max(min(int(layout.is_own[layout.question :].sum()), self.keep_tokens // 2), 1)
        self.kept: list[np.ndarray] | None = None
        self.pages: Segment | None = None
        self.is_done = False
        self._queries: list[list[torch.Tensor]] = []

    @property
    def num_pages(self) -> int:
        """Pages of documents that stay at most."""
        return -(-self.keep_tokens // self.layout.page_size)

    @property
    def num_kept(self) -> int:
        """Document rows that stay, without chosen ones."""
        places = zip(self.layout.places, self.kept or (), strict=False)
        return sum(int(kept.sum()) for place, kept in places if place.is_document)

    def save(self, stages: list[Stage], positions: np.ndarray) -> list[Stage]:
        """Stages of rows at some positions, with the states saved that the choice needs."""
        return save_before(stages, probed_layers(self._executor.spec.num_layers), self._asking(positions))

    def take(self, saved: torch.Tensor | None, positions: np.ndarray) -> None:
        if saved is not None and self.kept is None:
            self._queries.append(project_each(self._executor, saved, positions[self._asking(positions)]))

    def _asking(self, positions: np.ndarray) -> np.ndarray:
        return np.flatnonzero(positions >= len(self.layout.prompt) - self.window)

    def choose(self, own: np.ndarray, pages: array[int]) -> list[np.ndarray]:
        """`kept`, chosen once; the arguments are those of `attention`."""
        if self.kept is None:
            weights = attention(self._executor, self.layout, own, pages, self._queries)
            other = np.setdiff1d(np.arange(len(weights)), self.layout.candidates)
            weights[torch.from_numpy(other).to(weights.device)] = 0
            self.kept = self._best(smooth(weights).double().cpu().numpy(), len(own))
            self._queries = []
        return self.kept

    def _best(self, weights: np.ndarray, num_own: int) -> list[np.ndarray]:
        """The pages with most weight, as many as there is room for beside the document rows of the sequence."""
        layout, size = self.layout, self.layout.page_size
        room, left = self.keep_tokens - (num_own - int(layout.is_own.sum())), self.num_pages
        kept = [place.kept & (not place.is_document) for place in layout.places]
        pages = []
        for number, place in enumerate(layout.places):
            for at in range(0, place.entry.length if place.is_document else 0, size):
                rows = np.flatnonzero(place.kept[at : at + size]) + at
                if len(rows):
                    pages.append((-float(weights[place.start + rows].sum()), number, rows))
        for _, number, rows in sorted(pages, key=lambda page: page[0]):
            if len(rows) <= room and left:
                kept[number][rows] = True
                room, left = room - len(rows), left - 1
        return kept

    def leave(self) -> None:
        """Forget all but the choice: the request gives its pages back."""
        self.pages, self.is_done, self._queries = None, False, []

    def move(self, cache: PagedCache) -> None:
        """Copy the rows that stay to pages of the request's own, and read them there; pages to spare are freed."""
        assert self.kept is not None
        assert self.pages is not None
        fresh, used = self.pages.pages, 0
        for place, kept in zip(self.layout.places, self.kept, strict=True):
            place.keep(kept)
            if not place.is_document:
                continue
            table = array("i", [-1]) * len(place.pages)
            for page in np.unique(np.flatnonzero(kept) // self.layout.page_size).tolist():
                cache.pool.copy_rows(place.pages[page], fresh[used], self.layout.page_size)
                table[page], used = fresh[used], used + 1
            place.found(table)
        cache.allocator.release(fresh[used:])
        self.pages.pages, self.is_done = fresh[:used], True
