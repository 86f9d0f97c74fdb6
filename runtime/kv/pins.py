"""Pins: prefixes that operators lock in the cache, within the budget that they share with holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from secrets import token_hex

from radix import Holds, Match, Namespace, Node, RadixTree, path, text_of_path
from radix.node import TOKEN_BYTES
from runtime.calls import PinView
from runtime.errors import PinRefused


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that stays in the cache: the path that ends with `node`.

    A pinned node always ends the same prefix, since a split makes it the lower part.

    Attributes:
        owner: the tenant whose prefix is pinned.
        expires_s: time of expiry on the tree's clock; infinite: when the pin is removed.
        id: random, so that none repeats after a restart.
    """

    owner: Namespace
    node: Node
    expires_s: float
    id: str
    name: str | None = None

    @property
    def tokens(self) -> int:
        return len(text_of_path(self.node)) // TOKEN_BYTES


class PinBoard:
    """All pins of a cache.

    Pins share pages where their prefixes do; the budget counts distinct pages. A pin over the budget is refused. Pins
    displace holds. No pin starves a live request: if pins leave no room for it, the least recently used one is removed.

    Args:
        tree: the tree that holds the pages; its clock measures times to live.
        holds: the holds of the tree, whose budget pins share.

    Attributes:
        pins: by id.
        num_refused, num_broken: number of pins that were refused, or removed for a live request.
    """

    def __init__(self, tree: RadixTree, holds: Holds):
        self.tree, self.holds = tree, holds
        self.pins: dict[str, Pin] = {}
        self.num_refused = self.num_broken = 0
        self._soonest_s = inf  # no pin expires earlier

    def pin(self, tokens: array[int], namespace: Namespace, name: str | None, ttl_s: float | None) -> PinView | None:
        """Pin the whole pages of a prefix; `ttl_s` None: until the pin is removed.

        Returns None, without a pin, if tokens have to be computed first. Raises PinRefused.
        """
        page_size = self.tree.page_size
        wanted = len(tokens) // page_size
        if not wanted:
            raise self._refused(f"the prefix is shorter than a page of {page_size} tokens")
        match = self.tree.match(tokens[: wanted * page_size].tobytes(), namespace)
        missing = wanted - len(match.pages)
        self._check(match, missing)
        return None if missing else self.view(self._add(match, name, ttl_s))

    def pin_node(self, node: Node) -> PinView:
        """Pin the prefix that ends in a node. Raises PinRefused."""
        match = Match(node=node, node_pages=len(node.pages))
        self._check(match)
        return self.view(self._add(match, None, None))

    def _check(self, match: Match, missing: int = 0) -> None:
        """Raise PinRefused if a match and `missing` pages after it cannot be pinned within the budget."""
        self.expire()
        pinned, budget = self.tree.num_pinned_pages, self.holds.budget_pages
        wanted = pinned + self.tree.num_new_pinned_pages(match) + missing
        if wanted > budget:
            pages = f"{wanted} pages of {self.tree.page_size} tokens; the budget is {budget} pages"
            raise self._refused(f"all pins together would hold {pages}, of which {pinned} are pinned")

    def _refused(self, why: str) -> PinRefused:
        self.num_refused += 1
        return PinRefused(why)

    def _add(self, match: Match, name: str | None, ttl_s: float | None) -> Pin:
        node = self.tree.lock_match(match)
        assert node is not None
        self.holds.pinned(node, -1)
        self.tree.pin(node)
        self.tree.unlock(node)
        self.holds.fit()
        self.tree.touch(node)
        expires_s = inf if ttl_s is None else self.tree.now() + ttl_s
        pin = Pin(node.namespace.owner, node, expires_s, f"pin-{token_hex(8)}", name)
        self._soonest_s = min(self._soonest_s, expires_s)
        self.pins[pin.id] = pin
        return pin

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin; its pages stay cached until they are evicted. False if no pin has the id."""
        if (pin := self.pins.get(pin_id)) is not None:
            self._remove(pin)
        return pin is not None

    def unpin_all(self, tenant: str | None = None) -> None:
        """Remove all pins, or those of one tenant."""
        self._remove_each(pin for pin in self.pins.values() if tenant in (None, pin.owner.tenant))

    def unpin_node(self, node: Node) -> list[str]:
        """Remove the pins and the holds that keep a node in the cache; returns the ids of the pins."""
        found = [pin for pin in self.pins.values() if node in path(pin.node)]
        self._remove_each(found)
        self.holds.release(node)
        return [pin.id for pin in found]

    def view(self, pin: Pin) -> PinView:
        """A pin as clients see it; `tenant` is the owner's."""
        left = None if pin.expires_s == inf else max(round(pin.expires_s - self.tree.now(), 1), 0.0)
        return PinView(
            id=pin.id,
            name=pin.name,
            tenant=pin.owner.tenant,
            tokens=pin.tokens,
            hits=pin.node.hits,
            expires_in_s=left,
        )

    def expire(self) -> None:
        """Remove the pins whose time to live is over."""
        if (now := self.tree.now()) >= self._soonest_s:
            self._remove_each((pin for pin in self.pins.values() if pin.expires_s <= now), expired=True)
            self._soonest_s = min((pin.expires_s for pin in self.pins.values()), default=inf)

    def yield_one(self) -> bool:
        """Remove the least recently used pin to make room for a live request; False if there is none."""
        if not self.pins:
            return False
        self._remove(min(self.pins.values(), key=lambda pin: pin.node.last_use))
        self.num_broken += 1
        return True

    def _remove_each(self, pins: Iterable[Pin], expired: bool = False) -> None:
        for pin in list(pins):
            self._remove(pin, expired)

    def _remove(self, pin: Pin, expired: bool = False) -> None:
        del self.pins[pin.id]
        self.tree.unpin(pin.node, expired)
        self.holds.pinned(pin.node, 1)
