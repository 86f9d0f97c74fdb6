"""Pages that each tenant may keep in the tree."""

from __future__ import annotations

from collections.abc import Mapping

from radix.eviction import LRU, Order, Victim
from radix.namespace import Namespace
from radix.node import Node


class Quotas:
    """Pages by owner, and an order of each one's own victims: least recently used first.

    An owner is `Namespace.owner` of what it computes, unless the one who inserts names another: whoever computes pages
    that tenants share pays for them.

    Args:
        limits: pages by tenant.
        default: for a tenant that `limits` does not name; None: no limit.
    """

    def __init__(self, limits: Mapping[str, int], default: int | None = None):
        self._limits = limits
        self._default = default
        self._pages: dict[Namespace, int] = {}
        self._victims: dict[Namespace, LRU] = {}

    def limit(self, owner: Namespace) -> int | None:
        """Pages that an owner may keep; None: any number."""
        return self._limits.get(owner.tenant, self._default)

    def pages(self, owner: Namespace) -> int:
        """Pages of an owner, or of a namespace's owner."""
        return self._pages.get(owner.owner, 0)

    def over(self, owner: Namespace, coming: int) -> int:
        """By how many pages the owner would be over its quota with `coming` more."""
        limit = self.limit(owner)
        return 0 if limit is None else max(self.pages(owner) + coming - limit, 0)

    def add(self, owner: Namespace, pages: int) -> None:
        """Book pages that come; a negative number leaves."""
        self._pages[owner] = self._pages.get(owner, 0) + pages
        if not self._pages[owner]:
            del self._pages[owner]
            self._victims.pop(owner, None)

    def enter(self, node: Node) -> None:
        if self.limit(node.owner) is not None:
            if node.owner not in self._victims:
                self._victims[node.owner] = LRU(Order("tenant_queued"))
            self._victims[node.owner].enter(node)

    def pop(self, owner: Namespace) -> Victim | None:
        """The owner's next victim; None if nothing of it can go."""
        victims = self._victims.get(owner.owner)
        return None if victims is None else victims.pop()
