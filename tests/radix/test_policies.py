"""The policies by hand: each one's order of victims, step by step, on nodes of a real tree."""

from __future__ import annotations

import random
from array import array

import pytest

from radix import Namespace, Policy, RadixTree, make_policy
from radix.eviction import GDSF, LRU, Order
from radix.foresight import Foresight
from radix.node import Node


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Tree:
    """A tree of pages of one token; a run is named by its first token."""

    def __init__(self, policy: Policy):
        self.tree, self.policy, self.pages = RadixTree(1, policy), policy, 0
        self.nodes: dict[int, Node] = {}

    def add(self, *tokens: int, cost: float = 0.0) -> None:
        pages = array("i", range(self.pages, self.pages + len(tokens)))
        self.pages += len(tokens)
        node, _ = self.tree.insert(key(*tokens), pages, cost=cost)
        self.nodes[node.key[0]] = node

    def use(self, *names: int) -> None:
        for name in names:
            self.tree.use(self.nodes[name])

    def gone(self, count: int = 1) -> list[int]:
        """Evict so many whole runs; their names."""
        left = []
        while len(left) < count and (freed := self.tree.evict(1)):
            left += [name for name, node in self.nodes.items() if node.parent is None and freed[0] == node.pages[0]]
        return left


# -- the order ---------------------------------------------------------------------------------------------------


def leaf() -> Node:
    return Node(key(1), array("i", [0]), Node(b"", array("i"), None, Namespace()), Namespace())


def test_an_entry_holds_while_its_node_is_a_free_leaf():
    order, nodes = Order(), [leaf() for _ in range(3)]
    for node in nodes:
        order.push(1.0, node)
    nodes[0].refs = 1
    nodes[1].attach(key(2), leaf())
    assert [order.pop(), order.pop()] == [nodes[2], None]


def test_orders_of_different_books_do_not_disturb_each_other():
    node, tree, tenant = leaf(), Order(), Order("tenant_queued")
    tree.push(1.0, node)
    tenant.push(5.0, node)
    assert (node.queued, node.tenant_queued > node.queued) == (tree._heap[0][1], True)
    assert (tree.pop(), tenant.pop()) == (node, node)
    tree.push(1.0, node)
    Order().push(1.0, node)
    assert tree.pop() is None, "the same book"


def test_entries_that_do_not_hold_are_cleared_away_in_time():
    """Memory follows the nodes, however often they are used."""
    order, nodes = Order(), [leaf() for _ in range(10)]
    longest = 0
    for i in range(5_000):
        order.push(float(i), nodes[i % 10])
        longest = max(longest, len(order._heap))
        assert order._compact_at >= 64, "a few are not worth a look at all"
    assert longest <= 4 * 10 + 64
    assert [order.pop() for _ in range(11)] == [*nodes, None]
    many, order = [leaf() for _ in range(1_000)], Order()
    for i, node in enumerate(many):
        order.push(float(-i), node)
    assert [order.pop() for _ in many] == many[::-1], "those that hold stay"


def test_an_order_is_a_sorted_list_of_the_latest_entries():
    draw, order, nodes, latest = random.Random(2), Order(), [leaf() for _ in range(100)], {}
    for i in range(1_000):
        node, place = draw.choice(nodes), float(draw.randrange(50))
        order.push(place, node)
        latest[node] = (place, i)
    assert [order.pop() for _ in range(len(latest) + 1)] == [*sorted(latest, key=latest.__getitem__), None]


# -- least recently used -----------------------------------------------------------------------------------------


def test_lru_goes_by_the_last_use():
    tree = Tree(LRU())
    for name in (1, 2, 3, 4):
        tree.add(name)
    tree.use(2, 1)
    tree.tree.touch(tree.nodes[3])
    assert tree.gone(5) == [4, 2, 1, 3]


def test_absorbed_recency_is_the_later_of_both():
    tree = Tree(LRU())
    tree.add(1, 5)
    tree.add(1, 6)
    parent, child = tree.nodes[6].parent, tree.nodes[6]
    for times in ((3, 8), (8, 3)):
        parent.last_use, child.last_use = times
        parent.used_s, child.used_s = (10.0 * time for time in times)
        LRU().absorb(parent, child)
        assert (parent.last_use, parent.used_s) == (8, 80.0)


# -- GDSF --------------------------------------------------------------------------------------------------------


def test_gdsf_weighs_cost_by_page():
    tree = Tree(GDSF())
    tree.add(1, 11, cost=10.0)  # 5 a page
    tree.add(2, cost=6.0)
    tree.add(3, 13, 23, 33, cost=12.0)  # 3
    assert [tree.nodes[name].heat for name in (1, 2, 3)] == [5.0, 6.0, 3.0]
    assert tree.gone(3) == [3, 1, 2]


def test_gdsf_counts_uses():
    tree = Tree(GDSF())
    tree.add(1, cost=2.0)
    tree.add(2, cost=5.0)
    tree.use(1)
    assert tree.nodes[1].heat == 4.0
    tree.use(1)
    assert tree.nodes[1].heat == 6.0
    assert tree.gone(2) == [2, 1]


def test_gdsf_s_clock_rises_with_its_victims():
    tree = Tree(GDSF())
    tree.add(1, cost=4.0)
    tree.add(2, cost=7.0)
    assert tree.gone() == [1]
    tree.add(3, cost=2.0)
    assert tree.nodes[3].heat == 6.0
    tree.use(2)
    assert tree.nodes[2].heat == 4.0 + 2 * 7.0
    assert tree.gone() == [3]
    tree.add(4, cost=1.0)
    assert tree.nodes[4].heat == 7.0
    tree.policy.leaving(leaf(), 0)
    assert tree.policy._clock == 6.0, "it never goes back"


def test_gdsf_values_a_parent_anew_when_a_child_leaves():
    tree = Tree(GDSF())
    tree.add(1, 2, 3, cost=9.0)
    tree.add(1, 2, 4, cost=2.0)
    tree.use(4)
    parent = tree.nodes[4].parent
    assert (parent.hits, parent.cost) == (1, 6.0)
    tree.gone()
    assert tree.policy._clock == 3.0
    assert parent.heat == 3.0 + 2 * 6.0 / 2


def test_gdsf_s_clock_stays_while_a_part_of_a_run_leaves():
    tree = Tree(GDSF())
    tree.add(1, 2, cost=4.0)
    tree.tree.evict(1)
    assert tree.policy._clock == 0.0
    tree.tree.evict(1)
    assert tree.policy._clock == 2.0


@pytest.mark.parametrize(("name", "kind"), [("lru", LRU), ("foresight", Foresight), ("gdsf", GDSF)])
def test_policies_by_name(name, kind):
    policy = make_policy(name, 70)
    assert type(policy) is kind
    assert kind is not Foresight or policy._capacity == 70
