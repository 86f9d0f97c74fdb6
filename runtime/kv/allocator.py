"""Allocation of the pool's pages: contiguous where possible, with reference counts."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import numpy as np
from sortedcontainers import SortedDict, SortedList


class PageAllocator:
    """A ref-counted page allocator over free extents.

    Contiguous pages can be read as one view instead of a gather. So the allocator takes the smallest extent that holds
    all wanted pages, and lets a request grow directly after its last page.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_free = num_pages
        self.refs = np.zeros(num_pages, dtype=np.int32)
        self._by_start: SortedDict = SortedDict({0: num_pages} if num_pages else {})
        self._by_size: SortedList = SortedList([(num_pages, 0)] if num_pages else [])

    def allocate(self, count: int, after: int = -1) -> array[int] | None:
        """Take `count` pages with one reference each; None if fewer are free (then nothing is taken).

        Args:
            count: number of pages.
            after: page that the new pages should directly follow; -1: anywhere.
        """
        if count > self.num_free:
            return None
        pages = array("i")
        if after >= 0 and after + 1 in self._by_start:
            self._take(after + 1, count, pages)
        while len(pages) < count:
            want = count - len(pages)
            at = self._by_size.bisect_left((want, -1))
            _, start = self._by_size[min(at, len(self._by_size) - 1)]
            self._take(start, want, pages)
        self.num_free -= count
        self.refs[pages] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each page, as often as `pages` has it. The pages must be in use."""
        index, times = _count(pages)
        assert (self.refs[index] > 0).all(), "retain of a free page"
        self.refs[index] += times

    def release(self, pages: Collection[int]) -> None:
        """Drop a reference of each page, as often as `pages` has it. Pages without references are free again."""
        if not pages:
            return
        index, times = _count(pages)
        assert (self.refs[index] >= times).all(), "release of a free page"
        self.refs[index] -= times
        free = index[self.refs[index] == 0]
        self.num_free += len(free)
        for run in np.split(free, np.flatnonzero(np.diff(free) != 1) + 1) if len(free) else ():
            self._give(int(run[0]), len(run))

    def _take(self, start: int, want: int, pages: array[int]) -> None:
        size = self._by_start.pop(start)
        self._by_size.remove((size, start))
        used = min(size, want)
        pages.extend(range(start, start + used))
        if used < size:
            self._add(start + used, size - used)

    def _give(self, start: int, size: int) -> None:
        """Add a free extent, joined with its free neighbours."""
        at = self._by_start.bisect_left(start)
        if at < len(self._by_start):
            after, after_size = self._by_start.peekitem(at)
            if start + size == after:
                self._drop(after, after_size)
                size += after_size
        if at > 0:
            before, before_size = self._by_start.peekitem(at - 1)
            if before + before_size == start:
                self._drop(before, before_size)
                start, size = before, before_size + size
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        self._by_start[start] = size
        self._by_size.add((size, start))

    def _drop(self, start: int, size: int) -> None:
        del self._by_start[start]
        self._by_size.remove((size, start))

    def check(self, owned: Iterable[int] | None = None) -> None:
        """Raise AssertionError if extents, counts and references disagree.

        `owned`: the pages of all owners, each as often as it has owners; None: not compared.
        """
        free = np.zeros(self.num_pages, dtype=bool)
        for start, size in self._by_start.items():
            assert not free[start : start + size].any(), "extents overlap"
            free[start : start + size] = True
        assert sorted(self._by_size) == sorted((size, start) for start, size in self._by_start.items())
        assert free.sum() == self.num_free
        assert ((self.refs == 0) == free).all(), "a page is lost or both free and in use"
        if owned is not None:
            index, times = _count(owned)
            expected = np.zeros_like(self.refs)
            expected[index] = times
            assert (self.refs == expected).all(), "a page has more references than owners, or fewer"


def _count(pages: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pages in ascending order, and their multiplicities."""
    return np.unique(np.fromiter(pages, dtype=np.int64), return_counts=True)
