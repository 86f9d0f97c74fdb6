"""KV of layers with a sliding window: a pool with places for the pages that rows may still see."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from radix import Node
from radix.events import Watcher
from radix.stats import Cause
from runtime.kv.pool import KVPool

_NONE = -1
# Most rows of a request in a step. Each needs a row of the window's pool beside the window itself.
MOST_ROWS = 256


def most_places(window: int, page_size: int) -> int:
    """Largest number of places that a request uses; `window`: number of positions that a row sees."""
    return -(-(window + MOST_ROWS) // page_size) + 2


class NearPages(Watcher):
    """Places of pages in the pool of the layers with a window.

    A page of the main pool has a place while live requests may see its rows through a window. Afterwards it keeps the
    place until another page needs it. Places are taken from pages in this order: 1. pages that a window has passed, the
    earliest first; 2. pages where requests ended or parted, the longest unused first; 3. such pages that are protected.

    Args:
        pool: the pool of these layers.
        num_pages: number of pages of the main pool.

    Attributes:
        places: int32 [num_pages], the place of each page; -1: it has none.
        num_used: number of places that live requests may see.
        protected: returns the pages at the ends of pinned and held prefixes.
    """

    def __init__(self, pool: KVPool, num_pages: int):
        self.pool = pool
        self.places = np.full(num_pages, _NONE, dtype=np.int32)
        self.num_used = 0
        self.protected: Callable[[], set[int]] = set
        self._users = np.zeros(num_pages, dtype=np.int32)
        self._free = list(range(pool.num_pages))
        # Pages with a place that no live request uses.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    def has(self, pages: np.ndarray) -> np.ndarray:
        """Whether each of `pages` has a place, bool [n]."""
        return self.places[pages] != _NONE

    def take(self, pages: Iterable[int]) -> None:
        """Count a live request as a user of pages; those without a place get one, whose rows are not valid yet."""
        missing = []
        for page in pages:
            if not self._users[page]:
                self.num_used += 1
                self._passed.pop(page, None)
                self._kept.pop(page, None)
            self._users[page] += 1
            if self.places[page] == _NONE:
                missing.append(page)
        # Only now, so that none of `pages` loses its place.
        self.drop([*islice(self._victims(), max(len(missing) - len(self._free), 0))])
        for page in missing:
            self.places[page] = self._free.pop()

    def leave(self, pages: Iterable[int], keep: bool) -> None:
        """Undo `take`. `keep`: whether later requests are likely to resume behind these pages."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self.num_used -= 1
                (self._kept if keep else self._passed)[page] = None

    def move(self, page: int, other: int) -> None:
        """Replace a page by `other`, which has the same tokens: it gets the users, and the place unless it has one."""
        users = int(self._users[page])
        if self.places[page] == _NONE:
            return
        self.drop([page])
        if self.places[other] == _NONE:
            self.places[other] = self._free.pop()
            self._passed[other] = None
        if users:
            self.take([other])
            self._users[other] += users - 1

    def drop(self, pages: Iterable[int]) -> None:
        """Free the places of pages that are not used any more."""
        for page in pages:
            if (place := int(self.places[page])) != _NONE:
                self.num_used -= bool(self._users[page])
                self._users[page], self.places[page] = 0, _NONE
                self._passed.pop(page, None)
                self._kept.pop(page, None)
                self._free.append(place)

    def slots(self, slots: np.ndarray) -> np.ndarray:
        """Rows of this pool for rows of the main pool, int64; -1 stays."""
        pages, rows = np.divmod(slots, self.pool.page_size)
        return np.where(slots < 0, slots, self.places[pages].astype(np.int64) * self.pool.page_size + rows)

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        self.drop(node.pages[kept_pages:])

    def _victims(self) -> Iterator[int]:
        yield from self._passed
        protected = self.protected()
        yield from (page for page in self._kept if page not in protected)
        yield from (page for page in self._kept if page in protected)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        placed = np.flatnonzero(self.places != _NONE).tolist()
        assert sorted([*self._free, *self.places[placed].tolist()]) == list(range(self.pool.num_pages))
        used = set(np.flatnonzero(self._users).tolist())
        assert len(used) == self.num_used, "used places are counted wrongly"
        assert not self._passed.keys() & self._kept.keys()
        assert set(placed) == used | self._passed.keys() | self._kept.keys(), "a used page has no place"
