"""What an operator sees of a running engine, and does to single nodes of its tree."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict
from typing import Any

from radix import Block, Node, outline, path
from runtime.kv.cache import PagedCache
from runtime.request import Request

_Walk = Generator[None, None, list[Block]]


class Inspector:
    """Looks at a cache in small steps, so that requests hardly wait for it.

    A node is named by its first page and the tokens before it: when another node has come by the page since, the name
    no longer fits.
    """

    def __init__(self, cache: PagedCache):
        self._cache = cache
        self._walk: _Walk | None = None

    def outline(self, limit: int, preview_tokens: int, anew: bool) -> dict[str, Any]:
        """Go on with a walk over the tree, or begin one: `{"blocks": None}` until it has come to its end.

        With `anew`, a walk that was left in the middle is dropped: the tree has changed since.
        """
        if self._walk is None or anew:
            self._walk = outline(self._cache.tree, limit, preview_tokens)
        try:
            next(self._walk)
        except StopIteration as end:
            self._walk = None
            return {"blocks": [asdict(block) for block in end.value]}
        return {"blocks": None}

    def find(self, page: int, start: int) -> Node | None:
        """The node of a name. Walks the tree."""
        for node in self._cache.tree.nodes():
            if node.pages[0] == page:
                before = sum(len(above.pages) for above in path(node)) - len(node.pages)
                return node if before * self._cache.tree.page_size == start else None
        return None

    def pin(self, page: int, start: int) -> dict[str, Any]:
        """Pin the prefix that ends with a node: `{"found"}` and what `PinBoard.pin_node` returns."""
        node = self.find(page, start)
        return {"found": False} if node is None else {"found": True, **self._cache.pins.pin_node(node)}

    def unpin(self, page: int, start: int) -> dict[str, Any]:
        """Let every pin go that keeps a node: `{"found", "pins": their ids}`."""
        node = self.find(page, start)
        board = self._cache.pins
        kept = [] if node is None else [pin.id for pin in board.pins.values() if node in path(pin.node)]
        for pin_id in kept:
            board.unpin(pin_id)
        return {"found": node is not None, "pins": kept}

    def drop(self, page: int, start: int) -> dict[str, Any]:
        """Evict a node and what lies below it, but for what live requests or pins keep: `{"found", "tokens"}`."""
        node = self.find(page, start)
        freed = 0 if node is None else self._cache.drop(node)
        return {"found": node is not None, "tokens": freed * self._cache.tree.page_size}


def describe(request: Request, now_s: float) -> dict[str, Any]:
    """A live request as an operator sees it, without its text."""
    return {
        "rid": request.rid,
        "tenant": request.namespace.tenant,
        "prompt_tokens": request.prompt_len,
        "cached_tokens": max(request.cached_tokens, 0),
        "computed_tokens": request.num_computed,
        "output_tokens": request.num_output,
        "max_tokens": request.max_tokens - request.prompt_len,
        "age_s": now_s - request.arrival_s,
        "phase": request.phase,
    }
