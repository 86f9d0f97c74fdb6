"""Prefixes that operators pin and tenants keep in the cache, within one budget."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from radix import Match, Namespace, Node, RadixTree, path
from runtime.kv.keeps import Keeps


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
    """All pins of a cache, and the prefixes that its tenants keep.

    They share pages where their prefixes do; the budget counts distinct pages. A pin over the budget is refused. Pins
    come before kept prefixes, which yield to them. Tenants share the rest of the budget: each may use all that others
    leave, and what it keeps beyond an equal share yields to those that have less, the least recently used prefix first.

    None of this starves a live request: where it alone leaves no room for one, the least recently used prefix yields.

    Args:
        tree: the tree that holds the pages.
        budget_pages: most pages that all pins and kept prefixes may hold together.
        clock: seconds, for times to live.
        expired: told of the node at the end of each prefix whose time is over.
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
        self.keeps = Keeps(tree)
        self.num_refused = 0
        self.num_broken = 0
        self.num_unkept = 0
        self.num_displaced = 0
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
        if (why := self._claim(match, missing)) is not None:
            return self._refuse(why)
        if missing:
            return {"missing_tokens": missing * page_size}
        return {"pin": self.describe(self._add(match, name, ttl_s))}

    def pin_node(self, node: Node) -> dict[str, Any]:
        """Pin the prefix that ends in a node: `{"pin": ...}`, or `{"refused": why}`."""
        match = Match(node=node, node_pages=len(node.pages))
        if (why := self._claim(match)) is not None:
            return self._refuse(why)
        return {"pin": self.describe(self._add(match, None, None))}

    def keep(self, tokens: array[int], namespace: Namespace, keeper: Namespace, ttl_s: float) -> str | None:
        """Keep the whole pages of a cached prefix for a tenant, for `ttl_s` seconds from its last use on.

        Returns:
            The reason if it is not kept, else None.
        """
        wanted = len(tokens) // self.tree.page_size
        match = self.tree.match(tokens[: wanted * self.tree.page_size].tobytes(), namespace)
        if not wanted:
            why: str | None = f"it is shorter than a page of {self.tree.page_size} tokens"
        elif len(match.pages) < wanted:
            why = "it is not in the cache"
        elif self.tree.quotas is not None and any(node.owner != keeper for node in path(match.node)):
            why = "some of its pages count against the quota of another tenant"
        else:
            why = self._claim(match, keeper=keeper)
        if why is None:
            self.keeps.add(match, keeper, ttl_s, self._clock())
        else:
            self.num_unkept += 1
        return why

    def renew(self, node: Node | None, keeper: Namespace) -> None:
        """Book a tenant's use of the prefix that ends with a node."""
        self.keeps.renew(node, keeper, self._clock())

    def _claim(self, match: Match, missing: int = 0, keeper: Namespace | None = None) -> str | None:
        """Make room in the budget for a match and missing pages behind it; the reason if there cannot be room.

        `keeper`: the tenant for whom they are to be kept; None: for a pin.
        """
        self.expire()
        if self._num_over(match, missing) <= 0:
            return None
        held = self.keeps.nodes()
        pinned = {node for pin in self.pins.values() for node in path(pin.node)}
        own = pinned if keeper is None else held[keeper]
        wanted = _num_pages(own) + missing + sum(len(node.pages) for node in path(match.node) if node not in own)
        if match.node is not None and match.node not in own:
            wanted -= len(match.node.pages) - match.node_pages
        share = self.budget_pages if keeper is None else (self.budget_pages - _num_pages(pinned)) // len(held)
        if wanted <= share:
            self._displace(match, missing, share, held, keeper)
            if self._num_over(match, missing) <= 0:
                return None
        pages = f"{wanted} pages of {self.tree.page_size} tokens; the budget is {share} pages"
        if keeper is None:
            return f"all pins together would hold {pages}, of which {_num_pages(own)} are pinned"
        return f"all that this tenant keeps would be {pages}, its share of {self.budget_pages}"

    def _num_over(self, match: Match, missing: int) -> int:
        """Pages over the budget, with a match and missing pages behind it."""
        return self.tree.num_pinned_pages + self.tree.num_new_pinned_pages(match) + missing - self.budget_pages

    def _displace(
        self, match: Match, missing: int, share: int, held: dict[Namespace, set[Node]], keeper: Namespace | None
    ) -> None:
        """Let go of others' keeps until there is room: those beyond the share of their tenants; for a pin, any."""
        pages = {tenant: _num_pages(nodes) for tenant, nodes in held.items()}
        for keep in self.keeps.oldest():
            if self._num_over(match, missing) <= 0:
                return
            if keeper is None or (keep.keeper != keeper and pages[keep.keeper] > share):
                before = self.tree.num_pinned_pages
                self.keeps.remove([keep])
                pages[keep.keeper] -= before - self.tree.num_pinned_pages
                self.num_displaced += 1

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
        """Remove all pins, and let go of all that tenants keep."""
        for pin_id in list(self.pins):
            self.unpin(pin_id)
        self.keeps.remove(self.keeps.keeps.values())

    def unpin_node(self, node: Node) -> list[str]:
        """Remove every pin that keeps a node, and let go of what tenants keep with it; ids of the pins."""
        found = [pin.id for pin in self.pins.values() if node in path(pin.node)]
        for pin_id in found:
            self.unpin(pin_id)
        self.keeps.remove(keep for keep in self.keeps.keeps.values() if node in path(keep.node))
        return found

    def expire(self) -> None:
        """Remove the pins whose time to live is over, and what tenants have not used in its time."""
        now = self._clock()
        for node in self.keeps.expire(now):
            self._expired(node)
        for pin in list(self.pins.values()):
            if pin.expires_s is not None and pin.expires_s <= now:
                self.unpin(pin.id)
                self._expired(pin.node)

    def yield_one(self) -> bool:
        """Let go of the least recently used prefix, as a live request needs its room; False if there is none.

        Kept ones go before pinned ones.
        """
        if self.keeps.keeps:
            self.keeps.remove(self.keeps.oldest()[:1])
            self.num_displaced += 1
            return True
        if not self.pins:
            return False
        self.num_broken += 1
        return self.unpin(min(self.pins.values(), key=lambda pin: pin.node.last_use).id)

    def describe_kept(self) -> list[dict[str, Any]]:
        """The prefixes that tenants keep, in sums: tenant and salt, number, tokens of their distinct pages."""
        count = Counter(keep.keeper for keep in self.keeps.keeps.values())
        tokens = {keeper: _num_pages(nodes) * self.tree.page_size for keeper, nodes in self.keeps.nodes().items()}
        return [
            {"tenant": keeper.tenant, "prefixes": count[keeper], "tokens": tokens[keeper]} for keeper in sorted(count)
        ]

    def describe(self, pin: Pin) -> dict[str, Any]:
        """A pin as shown to clients; `tenant` is an account."""
        left = None if pin.expires_s is None else max(pin.expires_s - self._clock(), 0.0)
        told = {"id": pin.id, "name": pin.name, "tenant": pin.namespace.tenant, "tokens": pin.tokens}
        return {**told, "hits": pin.node.hits, "expires_in_s": left}


def _num_pages(nodes: Iterable[Node]) -> int:
    return sum(len(node.pages) for node in nodes)
