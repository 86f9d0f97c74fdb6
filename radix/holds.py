"""Holds: what a request has used, or asks to keep, is evicted last until a time has passed, within a budget."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from itertools import count

from radix.events import Watcher
from radix.eviction import LRU, Order, Outlook, Policy, Victim
from radix.match import Match
from radix.namespace import Namespace
from radix.node import Node, path
from radix.stats import Cause
from radix.tree import RadixTree

_serials = count()


class Holds(Watcher):
    """The held nodes of a tree, in all of its victim orders the last victims.

    A node loses its hold when its time is over. If held pages exceed the budget, the owner with most of them loses the
    holds of its longest unused nodes. A held node has held ancestors, whose time is not over before its own.

    A hold that slides restarts its time with each use of the path.

    Args:
        tree: the tree, whose clock measures the times. The first hold wraps its policy and the orders of its quotas.
        budget_pages: largest number of pages that are held or pinned at the same time.

    Attributes:
        num_pages: number of held pages that are not pinned.
        num_lost: pages that lost their hold early, because of the budget.
        num_broken: held pages that were evicted, because nothing else was left to make room or to meet a quota.
        kept: the ends of the paths whose holds slide.
        num_kept_lost, num_refused: number of ends that lost their hold early or were evicted, or were never held.
    """

    def __init__(self, tree: RadixTree, budget_pages: int):
        self.budget_pages = budget_pages
        self.num_pages = self.num_lost = self.num_broken = self.num_kept_lost = self.num_refused = 0
        self.kept: set[Node] = set()
        self._tree = tree
        # Numbers of the held nodes by owner: the longest unused first, children before their parents.
        self._numbers: dict[Namespace, OrderedDict[Node, int]] = {}
        self._pages = Counter[Namespace]()
        self._nodes: dict[int, Node] = {}
        # A heap of ends and numbers; an entry may be too early, or of no node any more.
        self._ends: list[tuple[float, int]] = []
        self._is_watching = False

    def _watch(self) -> None:
        """Wrap the victim orders at the first hold: trees without holds do not pay for them."""
        tree, self._is_watching = self._tree, True
        tree.policy = _HeldLast(tree.policy, self, Order())
        tree.watch(self)
        if tree.quotas is not None:
            tree.quotas.wrap(lambda policy: _HeldLast(policy, self, Order("tenant_queued")))

    def hold(self, node: Node | None, seconds: float, slides: bool = False) -> None:
        """Hold the path that ends in `node` for `seconds` from now on; nodes that are held for longer stay so."""
        if not self._is_watching:
            self._watch()
        self.expire()
        until_s = self._tree.now() + seconds
        for above in path(node):
            if not above.held_until_s:
                self._begin(above, until_s)
                self._count(above, len(above.pages))
            above.slide_s = max(above.slide_s, seconds * slides)
            self._use(above, until_s)
        if node is not None and slides:
            self.kept.add(node)
        self.fit()

    def keep(self, match: Match, seconds: float) -> bool:
        """Hold matched pages until `seconds` after their last use; False if the budget has no room for them."""
        room = self.budget_pages - self._tree.num_pinned_pages
        if match.node is None or self._tree.num_new_pinned_pages(match) > room:
            return False
        node = self._tree.lock_match(match)
        self.hold(node, seconds, slides=True)
        self._tree.unlock(node)
        return node in self.kept

    @property
    def num_kept_pages(self) -> int:
        """Number of pages whose holds slide, without pinned ones."""
        return _num_sliding(node for node in self._nodes.values() if not node.pins)

    def sums(self) -> list[tuple[Namespace, int, int]]:
        """By owner of paths whose holds slide: the number of their ends, and of their pages."""
        ends = Counter(node.namespace.owner for node in self.kept)
        return [(owner, ends[owner], _num_sliding(self._numbers[owner])) for owner in sorted(ends)]

    def renew(self, node: Node | None) -> None:
        """Restart the times of the holds that slide, on the path that ends in `node` and in what is attached to it."""
        if not self.kept:
            return
        now = self._tree.now()
        for above in path(node):
            attached = (child for child in above.children.values() if child.is_attached) if above.num_attached else ()
            for one in (*attached, above):
                if one.slide_s:
                    self._use(one, now + one.slide_s)

    @contextmanager
    def spared(self) -> Iterator[None]:
        """A context in which no flush drops the paths whose holds slide."""
        self.expire()
        locked = list(self.kept)
        for node in locked:
            self._tree.lock(node)
        yield
        for node in locked:
            self._tree.unlock(node)

    def release(self, node: Node) -> None:
        """End the holds of a node and of all below it."""
        for held in [held for held in self._nodes.values() if node in path(held)]:
            self._end(held)

    def pinned(self, node: Node, sign: int) -> None:
        """Count the held pages that a pin of `node` locks (`sign` -1, before it) or unlocks (1, after it)."""
        for above in path(node):
            if above.pins:
                break
            if above.held_until_s:
                self._add(above, sign * len(above.pages))

    def fit(self) -> None:
        """Meet the budget."""
        while self.num_pages and self.num_pages + self._tree.num_pinned_pages > self.budget_pages:
            (most, _), *_ = self._pages.most_common(1)
            oldest = next(node for node in self._numbers[most] if not node.pins)
            self.num_lost += len(oldest.pages)
            self.num_kept_lost += oldest in self.kept
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
                node.expired_s = node.held_until_s
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
            upper.slide_s = lower.slide_s
            for above in path(upper):  # parents after their children
                self._numbers[above.namespace.owner].move_to_end(above)

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        if node.held_until_s:
            pages = len(node.pages) - kept_pages
            self._count(node, -pages)
            if cause != "flush":
                self.num_broken += pages
                self.num_kept_lost += node in self.kept
            self.kept.discard(node)
            if not kept_pages:
                self._forget(node)

    def _begin(self, node: Node, until_s: float) -> None:
        node.held_until_s = until_s
        number = next(_serials)
        self._numbers.setdefault(node.namespace.owner, OrderedDict())[node] = number
        self._nodes[number] = node
        heappush(self._ends, (until_s, number))

    def _use(self, node: Node, until_s: float) -> None:
        self._numbers[node.namespace.owner].move_to_end(node)
        node.held_until_s = max(node.held_until_s, until_s)

    def _forget(self, node: Node) -> None:
        mine = self._numbers[node.namespace.owner]
        del self._nodes[mine.pop(node)]
        if not mine:
            del self._numbers[node.namespace.owner]
        node.held_until_s = node.slide_s = 0.0
        self.kept.discard(node)

    def _count(self, node: Node, pages: int) -> None:
        if not node.pins:
            self._add(node, pages)

    def _add(self, node: Node, pages: int) -> None:
        self.num_pages += pages
        self._pages[node.namespace.owner] += pages
        if not self._pages[node.namespace.owner]:
            del self._pages[node.namespace.owner]

    def _end(self, node: Node) -> None:
        self._count(node, -len(node.pages))
        self._forget(node)
        self._tree.enqueue(node)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Walks the whole tree."""
        held = {node for node in self._tree.nodes() if node.held_until_s}
        assert held == {node for mine in self._numbers.values() for node in mine} == set(self._nodes.values())
        num_pages = sum(len(node.pages) for node in held if not node.pins)
        assert self.num_pages == self._pages.total() == num_pages
        assert not num_pages or num_pages + self._tree.num_pinned_pages <= self.budget_pages
        assert self.kept <= {node for node in held if node.slide_s}
        ends = {number: end_s for end_s, number in sorted(self._ends, reverse=True)}
        for node in held:
            assert ends[self._numbers[node.namespace.owner][node]] <= node.held_until_s, "nothing would end the hold"
            above = next(path(node.parent), None)
            assert above is None or above.held_until_s >= node.held_until_s, "a parent's hold ends before its child's"


def _num_sliding(nodes: Iterable[Node]) -> int:
    return sum(len(node.pages) for node in nodes if node.slide_s)


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
