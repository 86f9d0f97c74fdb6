"""Prefixes that an operator keeps in the cache, within a budget."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from radix import Match, Namespace, Node, RadixTree, path


@dataclass(slots=True, eq=False)
class Pin:
    """A pinned prefix; `expires_s` is on the board's clock, None: never. No pin of a later engine has its `id`."""

    id: str
    name: str | None
    namespace: Namespace
    tokens: int
    node: Node
    expires_s: float | None


class PinBoard:
    """All pins of a cache.

    Pins share pages where their prefixes do; the budget counts distinct pages. A pin over the budget is refused. A pin
    never starves a live request: where pins alone leave no room for one, the least recently used pin yields.

    Args:
        tree: the tree that holds the pages.
        budget_pages: most pages that all pins may hold together.
        clock: seconds, for times to live.
        expired: told of the end of each pin whose time is over.
    """

    def __init__(
        self,
        tree: RadixTree,
        budget_pages: int,
        clock: Callable[[], float],
        expired: Callable[[Node], None] = lambda node: None,
    ):
        self.tree = tree
        self.budget_pages = budget_pages
        self.pins: dict[str, Pin] = {}
        self.num_refused = 0
        self.num_broken = 0
        self._clock = clock
        self._expired = expired

    def pin(self, tokens: array[int], namespace: Namespace, name: str | None, ttl_s: float | None) -> dict[str, Any]:
        """Pin the whole pages of a prefix.

        Returns:
            `{"pin": ...}` with the new pin; `{"missing_tokens": n}` if some of it has to be computed first; or
            `{"refused": why}`.
        """
        page_size = self.tree.page_size
        wanted = len(tokens) // page_size
        if not wanted:
            return self._refuse(f"the prefix is shorter than a page of {page_size} tokens")
        match = self.tree.match(tokens[: wanted * page_size].tobytes(), namespace)
        missing = wanted - len(match.pages)
        if (why := self._over_budget(match, missing)) is not None:
            return self._refuse(why)
        if missing:
            return {"missing_tokens": missing * page_size}
        return {"pin": self.describe(self._add(match, name, ttl_s))}

    def pin_node(self, node: Node) -> dict[str, Any]:
        """Pin the prefix that ends in a node: `{"pin": ...}`, or `{"refused": why}`."""
        match = Match(node=node, node_pages=len(node.pages))
        if (why := self._over_budget(match, 0)) is not None:
            return self._refuse(why)
        return {"pin": self.describe(self._add(match, None, None))}

    def _over_budget(self, match: Match, missing: int) -> str | None:
        """Reason to refuse a pin of a match and of missing pages behind it; None if the budget allows it."""
        self.expire()
        pages = self.tree.num_pinned_pages + self.tree.num_new_pinned_pages(match) + missing
        if pages <= self.budget_pages:
            return None
        return (
            f"all pins together would hold {pages} pages of {self.tree.page_size} tokens; the budget is "
            f"{self.budget_pages} pages, of which {self.tree.num_pinned_pages} are pinned"
        )

    def _refuse(self, why: str) -> dict[str, Any]:
        self.num_refused += 1
        return {"refused": why}

    def _add(self, match: Match, name: str | None, ttl_s: float | None) -> Pin:
        node = self.tree.lock_match(match)
        assert node is not None
        self.tree.pin(node)
        self.tree.unlock(node)
        self.tree.touch(node)
        tokens = sum(len(above.pages) for above in path(node)) * self.tree.page_size
        expires_s = None if ttl_s is None else self._clock() + ttl_s
        pin = Pin(f"pin-{token_hex(8)}", name, node.namespace, tokens, node, expires_s)
        self.pins[pin.id] = pin
        return pin

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin; its pages stay cached until they are evicted. False if there is none."""
        pin = self.pins.pop(pin_id, None)
        if pin is not None:
            self.tree.unpin(pin.node)
        return pin is not None

    def unpin_all(self) -> None:
        for pin_id in list(self.pins):
            self.unpin(pin_id)

    def expire(self) -> None:
        """Remove the pins whose time to live is over."""
        now = self._clock()
        for pin in list(self.pins.values()):
            if pin.expires_s is not None and pin.expires_s <= now:
                self.unpin(pin.id)
                self._expired(pin.node)

    def yield_one(self) -> bool:
        """Remove the least recently used pin, as a live request needs its room; False if there is none."""
        if not self.pins:
            return False
        oldest = min(self.pins.values(), key=lambda pin: pin.node.last_use)
        self.num_broken += 1
        return self.unpin(oldest.id)

    def describe(self, pin: Pin) -> dict[str, Any]:
        """A pin as shown to clients."""
        left = None if pin.expires_s is None else max(pin.expires_s - self._clock(), 0.0)
        return {"id": pin.id, "name": pin.name, "tokens": pin.tokens, "hits": pin.node.hits, "expires_in_s": left}
