"""The `prefix` strategy for models of which some layers have a sliding window, and free the rows behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from radix import path
from runtime.kv.cache import PagedCache
from runtime.kv.near import MOST_ROWS, NearPages, most_places
from runtime.request import Found, Lease, Request, Work
from runtime.reuse.prefix import PrefixLease, PrefixStrategy


@dataclass(slots=True)
class _View:
    """What a running request may see through the window: its pages `first` to `stop` (exclusive).

    `reserved`: most places that it has at the same time; `ends`: lengths at which later requests may part from it.
    """

    first: int
    stop: int
    reserved: int
    ends: tuple[int, ...]


@dataclass(slots=True)
class WindowedFound(Found):
    """A look-up of which the last rows have places. `shared`: the leading tokens in the tree, also without places."""

    shared: int


class WindowedLease(PrefixLease):
    """Reads a prefix, and has places for the pages that the request's rows see. `view`: None if it does not run."""

    strategy: WindowedPrefix
    view: _View | None = None

    def look(self) -> WindowedFound:
        """The longest cached prefix whose last rows have places. Only the longest of all may end within a page."""
        found = super().look()
        match = found.match
        page_size, pages = self.cache.page_size, np.frombuffer(match.pages, dtype=np.int32)
        ends = np.arange(len(pages) + 1)  # in pages; behind each, the last page without a place
        missing = np.maximum.accumulate(np.append(-1, np.where(self.strategy.near.has(pages), -1, ends[:-1])))
        has_partial = bool(match.partial_rows) and self.strategy.near.places[match.partial_page] >= 0
        if has_partial and missing[-1] < self._first(found.tokens):
            return WindowedFound(found.tokens, match, found.tokens)
        readable = missing < np.maximum(ends * page_size - self.strategy.window + 1, 0) // page_size
        lengths = reversed((np.flatnonzero(readable) * page_size).tolist())
        length = next(length for length in lengths if self.cut(length)[0] == length)
        if length < found.tokens:
            match = self.cache.tree.match(self.request.key(length), self.request.namespace)
        return WindowedFound(length, match, found.tokens)

    def peer(self, found: Found, computing: Sequence[Lease]) -> tuple[Request, int] | None:
        """A running request that shares its next page, too: pages before that one may have lost their places."""
        page_size = self.cache.page_size
        ends = [(other, (other.request.sequence.num_computed // page_size + 1) * page_size) for other in computing]
        key = self.request.key
        return super().peer(found, [other for other, end in ends if key(end) == other.request.key(end)])

    def _first(self, position: int) -> int:
        """The first page with a row that a row at `position` sees."""
        return max(position - self.strategy.window + 1, 0) // self.cache.page_size

    def admit(self, found: Found, headroom: int) -> bool:
        request = self.request
        assert isinstance(found, WindowedFound)
        near, match, length = self.strategy.near, found.match, found.tokens
        most = most_places(self.strategy.window, self.cache.page_size)
        reserved = min(most, self.cache.pages_for(request.max_length))
        if self.strategy.reserved + reserved > near.pool.num_pages:
            return False
        place = int(near.places[match.partial_page]) if match.partial_rows else -1
        if not super().admit(found, headroom):
            return False
        if request.event.lookup is not None:
            request.event.lookup.point = found.tokens
        self.strategy.reserved += reserved
        first, stop = self._first(length), self.cache.pages_for(length)
        self.view = _View(first, stop, reserved, (found.shared, request.prompt_len))
        near.take(self._pages(first, stop))
        if match.partial_rows:  # `admit` may have evicted the page, but nothing has overwritten its rows yet
            near.pool.copy_rows(place, int(near.places[request.sequence.pages[0]]), match.partial_rows)
        return True

    def _pages(self, first: int, stop: int) -> list[int]:
        """Pages of the request's tokens, by index."""
        request = self.request
        held, own = request.segments[0].pages[first:stop] if request.segments else [], request.sequence.pages
        before = request.sequence.start // self.cache.page_size
        return [*held, *own[max(first - before, 0) : max(stop - before, 0)]]

    def grow(self, ahead: int = 0) -> bool:
        if not super().grow(ahead):
            return False
        self._cover(self.request.sequence.num_computed + ahead + 1)
        return True

    def work(self, limit: int) -> Work:
        work = super().work(min(limit, MOST_ROWS))
        self._cover(work.start + work.count)
        return work

    def _cover(self, length: int) -> None:
        """Take places for the rows of a step."""
        view, stop = self.view, self.cache.pages_for(length)
        assert view is not None
        if stop > view.stop:
            self.strategy.near.take(self._pages(view.stop, stop))
            view.stop = stop

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        booked = super().book(work, saved, seconds)
        request, view = work.request, self.view
        assert view is not None
        if (first := self._first(request.sequence.num_computed)) > view.first:
            for index, page in enumerate(self._pages(view.first, first), view.first):
                is_end = any(self._first(end) <= index < self.cache.pages_for(end) for end in view.ends)
                self.strategy.near.leave([page], keep=is_end)
            view.first = first
        return booked

    def _commit(self) -> None:
        request = self.request
        before, own = request.sequence.start // self.cache.page_size, request.sequence.pages
        super()._commit()
        after = request.sequence.start // self.cache.page_size
        for mine, theirs in zip(own, self._pages(before, after), strict=False):
            if mine != theirs:
                self.strategy.near.move(mine, theirs)

    def release(self, keep: bool) -> None:
        if keep and self.view is not None:
            self._commit()
        self._leave()
        super().release(keep=False)

    def distrust(self) -> None:
        self._leave()
        super().distrust()

    def _leave(self) -> None:
        """Give up the request's places; pages of the tree keep them for now."""
        request = self.request
        if (view := self.view) is not None:
            self.strategy.near.leave(self._pages(view.first, view.stop), keep=True)
            self.strategy.near.drop(request.sequence.pages)
            self.strategy.reserved -= view.reserved
            self.view = None


class WindowedPrefix(PrefixStrategy[None]):
    """Exact prefix caching. A prefix can be read if its last rows, as many as a window has, still have their places.

    Attributes:
        near: the places of pages whose rows can be read through the window.
        window: number of positions of the largest window.
        reserved: most places that the running requests have at the same time.
    """

    def __init__(self, cache: PagedCache, num_layers: int, near: NearPages, window: int):
        """`window`: number of positions of the largest window."""
        super().__init__(cache, num_layers)
        self.near, self.window, self.reserved = near, window, 0
        cache.near, near.protected = near, self._protected
        cache.tree.watch(near)

    def open(self, request: Request, ask: None) -> WindowedLease:
        return WindowedLease(self, request)

    def _protected(self) -> set[int]:
        """Pages whose rows are read behind the ends of pinned and held prefixes."""
        pages = set[int]()
        for end in chain((pin.node for pin in self.cache.pins.pins.values()), self.cache.holds.ends()):
            left = self.cache.pages_for(self.window)
            for node in path(end):
                pages.update(node.pages[-left:])
                if (left := left - len(node.pages)) <= 0:
                    break
        return pages

    def figures(self) -> dict[str, float]:
        return {"window_pages_used": self.near.num_used}
