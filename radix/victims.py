"""Who is evicted next: the policy's choice among the leaves whose hold is over, then the oldest hold."""

from __future__ import annotations

from radix.node import Node
from radix.order import Order
from radix.policy import LRU, Policy


class Victims:
    """The evictable leaves of a tree, or of one tenant.

    Attributes:
        policy: orders the leaves that are not held.
        num_broken_holds: how many victims were held, because nothing else was left.
    """

    def __init__(self, policy: Policy, held: Order | None = None):
        self.policy = policy
        self.num_broken_holds = 0
        self._held = held or Order()

    @classmethod
    def of_tenant(cls) -> Victims:
        """A second order of some of a tree's leaves, beside the tree's own: least recently used first."""
        return cls(LRU(Order("tenant_queued")), Order("tenant_queued"))

    def enter(self, node: Node, now: float) -> None:
        """A node is an unreferenced leaf now, or was used while it was one."""
        if node.hold_until > now:
            self._held.push(node.hold_until, node)
        else:
            self.policy.enter(node)

    def pop(self, now: float) -> Node | None:
        """The next victim; None if nothing can go."""
        self._release(now)
        if (node := self.policy.pop()) is not None:
            return node
        if (node := self._held.pop()) is not None:
            self.num_broken_holds += 1
        return node

    def pop_due(self, now: float) -> Node | None:
        """The next victim, if it should go by itself; see `Policy.due`."""
        self._release(now)
        return self.policy.pop() if self.policy.due(now) else None

    def _release(self, now: float) -> None:
        while (first := self._held.first()) is not None and first[0] <= now:
            self._held.pop()
            self.policy.enter(first[1])
