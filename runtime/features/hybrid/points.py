"""Resume points: the state behind a number of tokens, as bytes in pages of the KV pool."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from radix import Namespace, Node, attached_key
from radix.node import TOKEN_BYTES
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run
from runtime.kv.states import StatePool
from runtime.request import Request

Behind = Literal["prompt", "answer", ""]


@dataclass(frozen=True, slots=True)
class Point:
    """The record of a point.

    Attributes:
        tokens: number of tokens before it.
        behind: `prompt` or `answer` for a point where a request's prompt or output ends; empty for others.
    """

    tokens: int
    behind: Behind = ""

    def describe(self) -> dict[str, object]:
        return {"point": self.tokens, "behind": self.behind}


class Points:
    """Stores states in the tree, and loads them.

    A point is an attached run behind the whole pages of its tokens. If the tokens end within a page, the run's first
    page has the KV of the last of them.

    Attributes:
        num_pages: pages of a state.
        cost: number of tokens whose KV takes as much memory as a state.
    """

    def __init__(self, cache: PagedCache, states: StatePool):
        self._cache, self._states = cache, states
        self.num_pages = -(-states.state_bytes // cache.pool.page_bytes)
        self.cost = -(-states.state_bytes * cache.page_size // cache.pool.page_bytes)

    def run(self, tokens: array[int], namespace: Namespace) -> Run:
        """The run that ends with the point behind all of `tokens`."""
        page_size = self._cache.page_size
        whole = len(tokens) // page_size * page_size
        path = tokens[:whole]
        path.frombytes(attached_key(tokens[whole:].tobytes(), self.num_pages, page_size * TOKEN_BYTES))
        return Run(path, namespace, meta=Point(len(tokens)), whole=True)

    def load(self, point: Node, slot: int) -> None:
        """Fill a slot with the state of a point."""
        data = self._cache.pool.read_pages(point.pages[-self.num_pages :])
        self._states.write(slot, data.flatten())

    def store(self, request: Request, length: int, behind: Behind, slot: int, seconds: float) -> Node | None:
        """Store a slot as the point behind the first `length` tokens of a request, whose whole pages the tree has.

        `behind`: see `Point`. `seconds`: time that it took to compute the tokens since the point before it.

        Returns:
            The point, which the tree may have had before; None if memory or the quota does not suffice.
        """
        cache, run = self._cache, self.run(request.tokens[:length], request.namespace)
        key, num_pages = run.tokens.tobytes(), len(run.tokens) // cache.page_size
        match = cache.tree.match(key, request.namespace)
        if len(match.pages) == num_pages:
            cache.tree.touch(match.node)
            return match.node
        whole, rows = divmod(length, cache.page_size)
        quotas = cache.tree.quotas
        limit = None if quotas is None else quotas.limit(request.owner)
        if limit is not None and num_pages > limit:
            return None
        fresh = cache.allocate(num_pages - whole, array("i"), request.owner)
        if fresh is None:
            return None
        pages = (request.segments[0].pages if request.segments else array("i")) + request.sequence.pages
        if rows:
            cache.pool.copy_rows(pages[whole], fresh[0], rows)
        size = self.num_pages * cache.pool.page_bytes
        cache.pool.write_pages(fresh[-self.num_pages :], self._states.read(slot, size))
        meta = Point(length, behind)
        node, _ = cache.insert(key, pages[:whole] + fresh, request.namespace, seconds, meta, request.owner)
        return node
