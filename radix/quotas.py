"""Quotas: limits on the number of pages that each tenant has in the tree."""

from collections.abc import Callable, Mapping

from radix.eviction import LRU, Order, Policy, Victim
from radix.namespace import Namespace
from radix.node import Node


class Quotas:
    """Counts the pages of each owner, and keeps a victim order for each: least recently used first.

    The owner of pages is `Namespace.owner`, unless the insertion names another: pages that tenants share count for the
    tenant that computed them.

    Args:
        limits: largest number of pages, by tenant.
        default: limit of tenants that are not in `limits`; None: no limit.

    Attributes:
        binding: whether a tenant has a limit.
    """

    def __init__(self, limits: Mapping[str, int], default: int | None = None):
        self.binding = bool(limits) or default is not None
        self._limits = limits
        self._default = default
        self._pages: dict[Namespace, int] = {}
        self._victims: dict[Namespace, Policy] = {}
        self._wrap: Callable[[Policy], Policy] = lambda policy: policy

    def wrap(self, wrap: Callable[[Policy], Policy]) -> None:
        """Put the victim order of each owner, also of later ones, into another one."""
        self._wrap = wrap
        self._victims = {owner: wrap(victims) for owner, victims in self._victims.items()}

    def limit(self, owner: Namespace) -> int | None:
        """Largest number of pages of an owner; None: no limit."""
        return self._limits.get(owner.tenant, self._default)

    def pages(self, owner: Namespace) -> int:
        """Number of pages in the tree of an owner, or of a namespace's owner."""
        return self._pages.get(owner.owner, 0)

    def over(self, owner: Namespace, coming: int) -> int:
        """Number of pages by which `coming` new pages would exceed the owner's quota."""
        limit = self.limit(owner)
        return 0 if limit is None else max(self.pages(owner) + coming - limit, 0)

    def add(self, owner: Namespace, pages: int) -> None:
        """Add to the owner's count; `pages` is negative for pages that leave."""
        self._pages[owner] = self._pages.get(owner, 0) + pages
        if not self._pages[owner]:
            del self._pages[owner]
            self._victims.pop(owner, None)

    def enter(self, node: Node) -> None:
        if self.limit(node.owner) is not None:
            if node.owner not in self._victims:
                self._victims[node.owner] = self._wrap(LRU(Order("tenant_queued")))
            self._victims[node.owner].enter(node)

    def pop(self, owner: Namespace) -> Victim | None:
        """The owner's next victim; None if there is none."""
        victims = self._victims.get(owner.owner)
        return None if victims is None else victims.pop()
