"""How many pages each tenant may keep in the tree."""

from __future__ import annotations

from collections.abc import Mapping

from radix.namespace import Namespace
from radix.node import Node
from radix.victims import Victims


class Quotas:
    """Pages by tenant, and an order of each one's own victims.

    Args:
        limits: pages by tenant.
        default: for a tenant that `limits` does not name; None: as many as there are.
    """

    def __init__(self, limits: Mapping[str, int], default: int | None = None):
        self._limits = limits
        self._default = default
        self._pages: dict[Namespace, int] = {}
        self._victims: dict[Namespace, Victims] = {}

    def pages(self, namespace: Namespace) -> int:
        """What the tenant of a namespace holds."""
        return self._pages.get(namespace.owner, 0)

    def over(self, namespace: Namespace, coming: int) -> int:
        """By how many pages the tenant would be over its quota with `coming` more."""
        tenant = namespace.owner
        limit = self._limits.get(tenant.tenant, self._default)
        return 0 if limit is None else max(self._pages.get(tenant, 0) + coming - limit, 0)

    def add(self, namespace: Namespace, pages: int) -> None:
        """Book pages that come, or with a negative number go."""
        tenant = namespace.owner
        self._pages[tenant] = self._pages.get(tenant, 0) + pages
        if not self._pages[tenant]:
            del self._pages[tenant]
            self._victims.pop(tenant, None)

    def enter(self, node: Node, now: float) -> None:
        """See `Victims.enter`."""
        tenant = node.namespace.owner
        if self._limits.get(tenant.tenant, self._default) is not None:
            self._victims.setdefault(tenant, Victims.of_tenant()).enter(node, now)

    def pop(self, namespace: Namespace, now: float) -> Node | None:
        """The tenant's next victim; None if nothing of it can go."""
        victims = self._victims.get(namespace.owner)
        return None if victims is None else victims.pop(now)
