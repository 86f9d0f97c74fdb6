"""Prefixes that stay in the cache: operators pin them, and tenants keep them, within one budget."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import inf
from secrets import token_hex
from typing import Any

from radix import Match, Namespace, Node, RadixTree, path, text_of_path
from radix.node import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that stays in the cache: the path that ends with `node`.

    A pinned node always ends the same prefix, since a split makes it the lower part.

    Attributes:
        owner: the tenant that keeps the prefix, or whose prefix an operator has pinned.
        ttl_s: time to live in seconds; infinite: until the pin is removed.
        sliding: whether a tenant keeps the prefix. Then each use by the tenant restarts the time to live.
        expires_s: time of expiry on the tree's clock.
        id, name: id and name of an operator's pin; ids are random, so that none repeats after a restart.
    """

    owner: Namespace
    node: Node
    ttl_s: float
    sliding: bool
    expires_s: float
    id: str = ""
    name: str | None = None

    @property
    def tokens(self) -> int:
        return len(text_of_path(self.node)) // TOKEN_BYTES


class PinBoard:
    """All pins of a cache.

    Pins share pages where their prefixes do; the budget counts distinct pages. An operator's pin over the budget is
    refused. Operators' pins displace kept prefixes. Tenants share the rest of the budget: each may use what the others
    leave. Tenants below an equal share displace the least recently used prefixes of tenants above it.

    No pin starves a live request: if pins alone leave no room for it, the least recently used pin is removed.

    Args:
        tree: the tree that holds the pages; its clock measures times to live.
        budget_pages: largest number of pages that all pins may hold together.

    Attributes:
        pins: operators' pins by id.
        kept: tenants' kept prefixes by tenant and node.
        num_refused, num_broken: number of operators' pins that were refused, or removed for a live request.
        num_unkept, num_displaced: number of prefixes that were not kept, or removed to make room.
    """

    def __init__(self, tree: RadixTree, budget_pages: int):
        self.tree = tree
        self.budget_pages = budget_pages
        self.pins: dict[str, Pin] = {}
        self.kept: dict[tuple[Namespace, Node], Pin] = {}
        self.num_refused = 0
        self.num_broken = 0
        self.num_unkept = 0
        self.num_displaced = 0
        self._soonest_s = inf  # no pin expires earlier

    # -- operators -------------------------------------------------------------------------------------------

    def pin(self, tokens: array[int], namespace: Namespace, name: str | None, ttl_s: float | None) -> dict[str, Any]:
        """Pin the whole pages of a prefix; `ttl_s` None: until the pin is removed.

        Returns:
            `{"pin": ...}` with the new pin; `{"missing_tokens": n}` if n tokens have to be computed first; or
            `{"refused": why}`.
        """
        page_size = self.tree.page_size
        match, wanted = self._match(tokens, namespace)
        if not wanted:
            return self._refuse(f"the prefix is shorter than a page of {page_size} tokens")
        missing = wanted - len(match.pages)
        if (why := self._claim(match, missing)) is not None:
            return self._refuse(why)
        if missing:
            return {"missing_tokens": missing * page_size}
        return {"pin": self.describe(self._add(match, name, ttl_s))}

    def pin_node(self, node: Node) -> dict[str, Any]:
        """Pin the prefix that ends in a node; returns `{"pin": ...}` or `{"refused": why}`."""
        match = Match(node=node, node_pages=len(node.pages))
        if (why := self._claim(match)) is not None:
            return self._refuse(why)
        return {"pin": self.describe(self._add(match, None, None))}

    def _add(self, match: Match, name: str | None, ttl_s: float | None) -> Pin:
        node = self._hold(match)
        self.tree.touch(node)
        ttl_s = inf if ttl_s is None else ttl_s
        pin = Pin(node.namespace.owner, node, ttl_s, False, self.tree.now() + ttl_s, f"pin-{token_hex(8)}", name)
        self._soonest_s = min(self._soonest_s, pin.expires_s)
        self.pins[pin.id] = pin
        return pin

    def _refuse(self, why: str) -> dict[str, Any]:
        self.num_refused += 1
        return {"refused": why}

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin; its pages stay cached until they are evicted. False if no pin has the id."""
        pin = self.pins.get(pin_id)
        if pin is not None:
            self._remove(pin)
        return pin is not None

    def unpin_all(self, tenant: str | None = None) -> None:
        """Remove all operators' pins and kept prefixes, or those of one tenant."""
        for pin in list(self._all()):
            if tenant in (None, pin.owner.tenant):
                self._remove(pin)

    def unpin_node(self, node: Node) -> list[str]:
        """Remove everything that keeps a node in the cache; returns the ids of operators' pins."""
        found = [pin for pin in self._all() if node in path(pin.node)]
        for pin in found:
            self._remove(pin)
        return [pin.id for pin in found if not pin.sliding]

    def describe(self, pin: Pin) -> dict[str, Any]:
        """An operator's pin as clients see it; `tenant` is the owner's."""
        left = None if pin.ttl_s == inf else max(round(pin.expires_s - self.tree.now(), 1), 0.0)
        shown = {"id": pin.id, "name": pin.name, "tenant": pin.owner.tenant, "tokens": pin.tokens}
        return {**shown, "hits": pin.node.hits, "expires_in_s": left}

    # -- tenants ---------------------------------------------------------------------------------------------

    def keep(self, tokens: array[int], namespace: Namespace, keeper: Namespace, ttl_s: float) -> str | None:
        """Keep the whole pages of a cached prefix for a tenant, until `ttl_s` seconds after its last use.

        If the tenant keeps the prefix already, it is renewed with the longer one of both times.

        Returns:
            The reason why the prefix is not kept; None if it is kept.
        """
        match, wanted = self._match(tokens, namespace)
        if not wanted:
            why: str | None = f"it is shorter than a page of {self.tree.page_size} tokens"
        elif len(match.pages) < wanted:
            why = "it is not in the cache"
        elif (
            (quotas := self.tree.quotas) is not None
            and quotas.binding
            and any(node.owner != keeper for node in path(match.node))
        ):
            why = "some of its pages count against the quota of another tenant"
        else:
            why = self._claim(match, keeper=keeper)
        if why is not None:
            self.num_unkept += 1
            return why
        now, node = self.tree.now(), self._hold(match)
        if (kept := self.kept.get((keeper, node))) is not None:
            self.tree.unpin(node)
            kept.ttl_s = max(kept.ttl_s, ttl_s)
        else:
            self.kept[keeper, node] = Pin(keeper, node, ttl_s, True, now + ttl_s)
        self._soonest_s = min(self._soonest_s, now + ttl_s)
        self.renew(node, keeper)
        return None

    def renew(self, node: Node | None, keeper: Namespace) -> None:
        """Restart the times to live of the prefixes that a tenant keeps on the path which ends in `node`."""
        if not self.kept:
            return
        now = self.tree.now()
        for above in path(node):
            attached = (child for child in above.children.values() if child.is_attached) if above.num_attached else ()
            for one in (above, *attached):
                if (pin := self.kept.get((keeper, one))) is not None:
                    pin.expires_s = now + pin.ttl_s

    def oldest_kept(self) -> list[Pin]:
        """All kept prefixes, the least recently used first."""
        return sorted(self.kept.values(), key=lambda pin: pin.expires_s - pin.ttl_s)

    def describe_kept(self) -> list[dict[str, Any]]:
        """By tenant: the number of kept prefixes, and the tokens of their distinct pages."""
        count = Counter(pin.owner for pin in self.kept.values())
        tokens = {keeper: _num_pages(nodes) * self.tree.page_size for keeper, nodes in self._kept_nodes().items()}
        return [
            {"tenant": keeper.tenant, "prefixes": count[keeper], "tokens": tokens[keeper]} for keeper in sorted(count)
        ]

    # -- both ------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Remove the pins whose time to live is over."""
        now = self.tree.now()
        if now < self._soonest_s:
            return
        for pin in list(self._all()):
            if pin.expires_s <= now:
                self._remove(pin, expired=True)
        self._soonest_s = min((pin.expires_s for pin in self._all()), default=inf)

    def yield_one(self) -> bool:
        """Remove a pin to make room for a live request: the least recently used, kept prefixes first. False if none."""
        if self.kept:
            self._remove(self.oldest_kept()[0])
            self.num_displaced += 1
        elif self.pins:
            self._remove(min(self.pins.values(), key=lambda pin: pin.node.last_use))
            self.num_broken += 1
        else:
            return False
        return True

    def _all(self) -> Iterable[Pin]:
        return chain(self.pins.values(), self.kept.values())

    def _match(self, tokens: array[int], namespace: Namespace) -> tuple[Match, int]:
        """The match of a prefix's whole pages, and the number of these pages."""
        wanted = len(tokens) // self.tree.page_size
        return self.tree.match(tokens[: wanted * self.tree.page_size].tobytes(), namespace), wanted

    def _hold(self, match: Match) -> Node:
        """Pin matched pages in the tree."""
        node = self.tree.lock_match(match)
        assert node is not None
        self.tree.pin(node)
        self.tree.unlock(node)
        return node

    def _remove(self, pin: Pin, expired: bool = False) -> None:
        if pin.sliding:
            del self.kept[pin.owner, pin.node]
        else:
            del self.pins[pin.id]
        self.tree.unpin(pin.node, expired)

    def _kept_nodes(self) -> dict[Namespace, set[Node]]:
        """The nodes of kept prefixes, by tenant."""
        nodes: dict[Namespace, set[Node]] = defaultdict(set)
        for pin in self.kept.values():
            nodes[pin.owner].update(path(pin.node))
        return nodes

    def _claim(self, match: Match, missing: int = 0, keeper: Namespace | None = None) -> str | None:
        """Make room in the budget for a match and `missing` pages after it; returns the reason if that is impossible.

        `keeper`: the tenant that keeps the prefix; None: an operator pins it.
        """
        self.expire()
        if self._num_over(match, missing) <= 0:
            return None
        kept = self._kept_nodes()
        pinned = {node for pin in self.pins.values() for node in path(pin.node)}
        own = pinned if keeper is None else kept[keeper]
        wanted = _num_pages(own) + missing + sum(len(node.pages) for node in path(match.node) if node not in own)
        if match.node is not None and match.node not in own:
            wanted -= len(match.node.pages) - match.node_pages
        share = self.budget_pages if keeper is None else (self.budget_pages - _num_pages(pinned)) // len(kept)
        if wanted <= share:
            self._displace(match, missing, share, kept, keeper)
            if self._num_over(match, missing) <= 0:
                return None
        pages = f"{wanted} pages of {self.tree.page_size} tokens; the budget is {share} pages"
        if keeper is None:
            return f"all pins together would hold {pages}, of which {_num_pages(own)} are pinned"
        return f"all that this tenant keeps would be {pages}, its share of {self.budget_pages}"

    def _num_over(self, match: Match, missing: int) -> int:
        """Number of pages over the budget, if a match and `missing` pages after it were pinned."""
        return self.tree.num_pinned_pages + self.tree.num_new_pinned_pages(match) + missing - self.budget_pages

    def _displace(
        self, match: Match, missing: int, share: int, kept: dict[Namespace, set[Node]], keeper: Namespace | None
    ) -> None:
        """Remove kept prefixes until there is room: for an operator any, for a keeper those of tenants over `share`."""
        pages = {tenant: _num_pages(nodes) for tenant, nodes in kept.items()}
        for pin in self.oldest_kept():
            if self._num_over(match, missing) <= 0:
                return
            if keeper is None or (pin.owner != keeper and pages[pin.owner] > share):
                before = self.tree.num_pinned_pages
                self._remove(pin)
                pages[pin.owner] -= before - self.tree.num_pinned_pages
                self.num_displaced += 1


def _num_pages(nodes: Iterable[Node]) -> int:
    return sum(len(node.pages) for node in nodes)
