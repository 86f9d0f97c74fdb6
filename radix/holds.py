"""Hold times: what a request has used is evicted last until a time has passed, within a budget."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from radix.events import Watcher
from radix.eviction import LRU, Order, Outlook, Policy, Victim
from radix.namespace import Namespace
from radix.node import Node, path
from radix.stats import Cause
from radix.tree import RadixTree

_serials = count()


class Holds(Watcher):
    """The held nodes of a tree, in all of its victim orders the last victims.

    A node loses its hold when its time is over. If held pages exceed the budget, the owner with most of them loses the
    holds of its longest unused nodes.
    A held node has held ancestors, whose time is not over before its own.

    Args:
        tree: the tree, whose clock measures the times. Its policy and the orders of its quotas are wrapped.
        budget_pages: largest number of pages that are held at the same time.

    Attributes:
        num_pages: number of held pages.
        num_lost: pages that lost their hold early, because of the budget.
        num_broken: held pages that were evicted, because nothing else was left to make room or to meet a quota.
    """

    def __init__(self, tree: RadixTree, budget_pages: int):
        self.budget_pages = budget_pages
        self.num_pages = self.num_lost = self.num_broken = 0
        self._tree = tree
        # Numbers of the held nodes by owner: the longest unused first, children before their parents.
        self._numbers: dict[Namespace, OrderedDict[Node, int]] = {}
        self._pages = Counter[Namespace]()
        self._nodes: dict[int, Node] = {}
        # A heap of ends and numbers; an entry may be too early, or of no node any more.
        self._ends: list[tuple[float, int]] = []
        tree.policy = _HeldLast(tree.policy, self, Order())
        tree.watch(self)
        if tree.quotas is not None:
            tree.quotas.make_order = lambda: _HeldLast(LRU(Order("tenant_queued")), self, Order("tenant_queued"))

    def hold(self, node: Node | None, seconds: float) -> None:
        """Hold the path that ends in `node` for `seconds` from now on; nodes that are held for longer stay so."""
        self.expire()
        until_s = self._tree.now() + seconds
        for above in path(node):
            if not above.held_until_s:
                self._begin(above, until_s)
                self._count(above, len(above.pages))
            self._numbers[above.namespace.owner].move_to_end(above)
            above.held_until_s = max(above.held_until_s, until_s)
        while self.num_pages > self.budget_pages:
            (most, _), *_ = self._pages.most_common(1)
            oldest = next(iter(self._numbers[most]))
            self.num_lost += len(oldest.pages)
            self._end(oldest)
        if len(self._ends) > 4 * len(self._nodes) + 64:
            self._ends = [(held.held_until_s, number) for number, held in self._nodes.items()]
            heapify(self._ends)

    def expire(self) -> None:
        """End the holds whose time is over."""
        now = self._tree.now()
        while self._ends and self._ends[0][0] <= now:
            number = heappop(self._ends)[1]
            node = self._nodes.get(number)
            if node is not None and node.held_until_s > now:
                heappush(self._ends, (node.held_until_s, number))
            elif node is not None:
                self._end(node)

    def ends(self) -> Iterator[Node]:
        """The held nodes without held nodes below them."""
        self.expire()
        held = self._nodes.values()
        yield from (node for node in held if not any(child.held_until_s for child in node.children.values()))

    def split(self, upper: Node, lower: Node) -> None:
        """See `Policy.split`: both parts are held as the node was."""
        if lower.held_until_s:
            self._begin(upper, lower.held_until_s)
            for above in path(upper):  # parents after their children
                self._numbers[above.namespace.owner].move_to_end(above)

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        if node.held_until_s:
            pages = len(node.pages) - kept_pages
            self._count(node, -pages)
            self.num_broken += pages if cause != "flush" else 0
            if not kept_pages:
                self._forget(node)

    def _begin(self, node: Node, until_s: float) -> None:
        node.held_until_s = until_s
        number = next(_serials)
        self._numbers.setdefault(node.namespace.owner, OrderedDict())[node] = number
        self._nodes[number] = node
        heappush(self._ends, (until_s, number))

    def _forget(self, node: Node) -> None:
        mine = self._numbers[node.namespace.owner]
        del self._nodes[mine.pop(node)]
        if not mine:
            del self._numbers[node.namespace.owner]
        node.held_until_s = 0.0

    def _count(self, node: Node, pages: int) -> None:
        self.num_pages += pages
        self._pages[node.namespace.owner] += pages
        if not self._pages[node.namespace.owner]:
            del self._pages[node.namespace.owner]

    def _end(self, node: Node) -> None:
        self._forget(node)
        self._count(node, -len(node.pages))
        self._tree.enqueue(node)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Walks the whole tree."""
        held = {node for node in self._tree.nodes() if node.held_until_s}
        assert held == {node for mine in self._numbers.values() for node in mine} == set(self._nodes.values())
        assert self.num_pages == self._pages.total() == sum(len(node.pages) for node in held) <= self.budget_pages
        ends = {number: end_s for end_s, number in sorted(self._ends, reverse=True)}
        for node in held:
            assert ends[self._numbers[node.namespace.owner][node]] <= node.held_until_s, "nothing would end the hold"
            above = next(path(node.parent), None)
            assert above is None or above.held_until_s >= node.held_until_s, "a parent's hold ends before its child's"


class _HeldLast(Policy):
    """The victims of a policy, but held nodes last: these in the order of their last use.

    Held nodes enter the policy as others do, and are put aside when they are its victims. A node is put aside at most
    once between two uses.

    Args:
        policy: the policy.
        holds: says when holds end.
        order: an empty order for the nodes that are put aside. It uses the same attribute of nodes as an `Order` of the
            policy, so that a node that enters one of them leaves the other.
    """

    def __init__(self, policy: Policy, holds: Holds, order: Order):
        self._policy, self._holds, self._aside = policy, holds, LRU(order)

    def used(self, node: Node, tick: int) -> None:
        self._policy.used(node, tick)

    def enter(self, node: Node) -> None:
        self._policy.enter(node)

    def pop(self) -> Victim | None:
        self._holds.expire()
        while (victim := self._policy.pop()) is not None and victim[0].held_until_s:
            self._aside.enter(victim[0])
        return victim or self._aside.pop()

    def split(self, upper: Node, lower: Node) -> None:
        self._policy.split(upper, lower)
        self._holds.split(upper, lower)

    def leaving(self, node: Node, kept_pages: int) -> None:
        self._policy.leaving(node, kept_pages)

    def absorb(self, parent: Node, child: Node) -> None:
        self._policy.absorb(parent, child)

    def outlook(self, node: Node) -> Outlook | None:
        return self._policy.outlook(node)
