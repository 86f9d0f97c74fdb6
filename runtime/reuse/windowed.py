"""The `prefix` strategy for models of which some layers have a sliding window, and free the rows behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from radix import Match, path
from runtime.kv.cache import PagedCache
from runtime.kv.near import MOST_ROWS, NearPages, most_places
from runtime.request import Found, Request, Work
from runtime.reuse.prefix import PrefixStrategy


@dataclass(slots=True)
class _View:
    """What a running request may see through the window: its pages `first` to `stop` (exclusive).

    `reserved`: most places that it has at the same time; `ends`: lengths at which later requests may part from it.
    """

    first: int
    stop: int
    reserved: int
    ends: tuple[int, ...]


class WindowedPrefix(PrefixStrategy):
    """Exact prefix caching. A prefix can be read if its last rows, as many as a window has, still have their places.

    `Request.reuse` is a `_View`.
    """

    def __init__(self, cache: PagedCache, num_layers: int, near: NearPages, window: int):
        """`window`: number of positions of the largest window."""
        super().__init__(cache, num_layers)
        self._near, self._window, self._reserved = near, window, 0
        cache.near, near.protected = near, self._protected
        cache.tree.watch(near)

    def find(self, request: Request) -> Found:
        """The longest cached prefix whose last rows have places. Only the longest of all may end within a page."""
        found = super().find(request)
        match: Match = found.detail
        page_size, pages = self.cache.page_size, np.frombuffer(match.pages, dtype=np.int32)
        ends = np.arange(len(pages) + 1)  # in pages; behind each, the last page without a place
        missing = np.maximum.accumulate(np.append(-1, np.where(self._near.has(pages), -1, ends[:-1])))
        has_partial = bool(match.partial_rows) and self._near.places[match.partial_page] >= 0
        if has_partial and missing[-1] < self._first(found.tokens):
            return found
        readable = missing < np.maximum(ends * page_size - self._window + 1, 0) // page_size
        length = int(np.flatnonzero(readable)[-1]) * page_size
        if length == found.tokens:
            return found
        return Found(length, self.cache.tree.match(request.key(length), request.namespace))

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """A running request that shares its next page, too: pages before that one may have lost their places."""
        page_size = self.cache.page_size
        ends = [(other, (other.sequence.num_computed // page_size + 1) * page_size) for other in computing]
        return super().peer(request, found, [other for other, end in ends if request.key(end) == other.key(end)])

    def _first(self, position: int) -> int:
        """The first page with a row that a row at `position` sees."""
        return max(position - self._window + 1, 0) // self.cache.page_size

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        near, match, length = self._near, found.detail, found.tokens
        reserved = min(most_places(self._window, self.cache.page_size), self.cache.pages_for(request.max_length))
        if self._reserved + reserved > near.pool.num_pages:
            return False
        shared, place = super().find(request).tokens, int(near.places[match.partial_page]) if match.partial_rows else -1
        if not super().admit(request, found, headroom):
            return False
        if request.event.lookup is not None:
            request.event.lookup.point = found.tokens
        self._reserved += reserved
        first, stop = self._first(length), self.cache.pages_for(length)
        request.reuse = _View(first, stop, reserved, (shared, request.prompt_len))
        near.take(self._pages(request, first, stop))
        if match.partial_rows:  # `admit` may have evicted the page, but nothing has overwritten its rows yet
            near.pool.copy_rows(place, int(near.places[request.sequence.pages[0]]), match.partial_rows)
        return True

    def _pages(self, request: Request, first: int, stop: int) -> list[int]:
        """Pages of the request's tokens, by index."""
        held, own = request.segments[0].pages[first:stop] if request.segments else [], request.sequence.pages
        before = request.sequence.start // self.cache.page_size
        return [*held, *own[max(first - before, 0) : max(stop - before, 0)]]

    def grow(self, request: Request, ahead: int = 0) -> bool:
        if not super().grow(request, ahead):
            return False
        self._cover(request, request.sequence.num_computed + ahead + 1)
        return True

    def work(self, request: Request, limit: int) -> Work:
        work = super().work(request, min(limit, MOST_ROWS))
        self._cover(request, work.start + work.count)
        return work

    def _cover(self, request: Request, length: int) -> None:
        """Take places for the rows of a step."""
        view, stop = request.reuse, self.cache.pages_for(length)
        if stop > view.stop:
            self._near.take(self._pages(request, view.stop, stop))
            view.stop = stop

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        booked = super().book(work, saved, seconds)
        request, view = work.request, work.request.reuse
        if (first := self._first(request.sequence.num_computed)) > view.first:
            for index, page in enumerate(self._pages(request, view.first, first), view.first):
                is_end = any(self._first(end) <= index < self.cache.pages_for(end) for end in view.ends)
                self._near.leave([page], keep=is_end)
            view.first = first
        return booked

    def _commit(self, request: Request) -> None:
        before, own = request.sequence.start // self.cache.page_size, request.sequence.pages
        super()._commit(request)
        after = request.sequence.start // self.cache.page_size
        for mine, theirs in zip(own, self._pages(request, before, after), strict=False):
            if mine != theirs:
                self._near.move(mine, theirs)

    def release(self, request: Request, keep: bool) -> None:
        if keep and request.reuse is not None:
            self._commit(request)
        self._leave(request)
        super().release(request, keep=False)

    def distrust(self, request: Request) -> None:
        self._leave(request)
        super().distrust(request)

    def _leave(self, request: Request) -> None:
        """Give up the request's places; pages of the tree keep them for now."""
        if (view := request.reuse) is not None:
            self._near.leave(self._pages(request, view.first, view.stop), keep=True)
            self._near.drop(request.sequence.pages)
            self._reserved -= view.reserved
            request.reuse = None

    def _protected(self) -> set[int]:
        """Pages whose rows are read behind the ends of pinned and held prefixes."""
        pages = set[int]()
        for end in chain((pin.node for pin in self.cache.pins.pins.values()), self.cache.holds.ends()):
            left = self.cache.pages_for(self._window)
            for node in path(end):
                pages.update(node.pages[-left:])
                if (left := left - len(node.pages)) <= 0:
                    break
        return pages

    def figures(self) -> dict[str, float]:
        return {"window_pages_used": self._near.num_used}
