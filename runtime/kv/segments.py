"""The KV of a request: segments of cached KV that it reads, and the one sequence that it computes."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from radix import Meta, Namespace, Node


@dataclass(slots=True, eq=False)
class Segment:
    """Cached KV that a request reads.

    Attributes:
        pages: int32 page ids, any subset of an entry's pages: attention does not depend on their order.
        length: number of rows; only the last page may be used in part.
        node: the locked tree node to which the pages belong; None: they still belong to this request alone.
    """

    pages: array[int]
    length: int
    node: Node | None = None


class Run(NamedTuple):
    """A path in the tree: int32 tokens, from the root of a namespace.

    `name`, `meta`: of an entry, its name and record; `whole`: whether the path is only useful as a whole.
    """

    tokens: array[int]
    namespace: Namespace
    name: str | None = None
    meta: Meta | None = None
    whole: bool = False


@dataclass(slots=True)
class Sequence:
    """Tokens that a request computes itself. An index into them is not a position.

    Attributes:
        tokens: int32.
        start: number of leading tokens whose KV is in the request's first segment, in whole pages.
        num_computed: number of leading tokens that have KV, in that segment or in `pages`.
        seconds: time that it took to compute the tokens that are not in the tree yet.
        pages: int32 page ids, for the tokens from `start` on; they belong to this request alone.
        pending: number of rows of entries that the request must encode before its own tokens.
        anchors: (index, position) pairs, ascending: from each index on, positions are consecutive.
    """

    tokens: array[int]
    start: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    pages: array[int] = field(default_factory=lambda: array("i"))
    pending: int = 0
    anchors: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    def position(self, index: int) -> int:
        """The position of one token, which need not exist yet."""
        nearest = 0 if len(self.anchors) == 1 else bisect_right(self.anchors, index, key=itemgetter(0)) - 1
        at, position = self.anchors[nearest]
        return position + index - at

    def positions(self, first: int, stop: int) -> np.ndarray:
        """The positions int64 [stop - first] of a range of indices."""
        if len(self.anchors) == 1 or stop - first == 1:
            position = self.position(first)
            return np.array((position,)) if stop - first == 1 else np.arange(position, position + stop - first)
        indices = np.arange(first, stop)
        starts, positions = np.array(self.anchors, dtype=np.int64).T
        nearest = np.searchsorted(starts, indices, side="right") - 1
        return positions[nearest] + indices - starts[nearest]

    def slots(self, first: int, stop: int, page_size: int) -> np.ndarray:
        """The pool slots int64 [stop - first] of a range of indices, none below `start`."""
        if stop - first == 1:
            page, row = divmod(first - self.start, page_size)
            return np.array((self.pages[page] * page_size + row,))
        return slots_of(self.pages, np.arange(first - self.start, stop - self.start), page_size)


def slots_of(pages: array[int] | np.ndarray, rows: np.ndarray, page_size: int) -> np.ndarray:
    """The pool slots int64 [n] of rows int64 [n] of pages int32."""
    table = np.frombuffer(pages, dtype=np.int32)
    return table[rows // page_size].astype(np.int64) * page_size + rows % page_size


class Holder(Protocol):
    """What the cache needs to know of a request."""

    segments: tuple[Segment, ...]
    sequence: Sequence

    def read(self, segments: Iterable[Segment]) -> None:
        """Replace the segments."""

    @property
    def owner(self) -> Namespace:
        """The tenant whose quota the pages count against."""

    @property
    def num_present(self) -> int:
        """Number of tokens whose KV the request reads or has computed."""
