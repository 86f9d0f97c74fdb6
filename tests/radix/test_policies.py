"""The policies by hand: each one's order of victims, step by step, on nodes of a real tree."""

import random
from array import array
from typing import get_args

import pytest

from radix import POLICIES, Namespace, Policy, RadixTree, make_policy
from radix.eviction import LRU, Order
from radix.foresight import Foresight
from radix.node import Node
from runtime.config import CacheConfig


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Tree:
    """A tree of pages of one token; a run is named by its first token."""

    def __init__(self, policy: Policy):
        self.tree, self.policy, self.pages = RadixTree(1, policy), policy, 0
        self.nodes: dict[int, Node] = {}

    def add(self, *tokens: int) -> None:
        pages = array("i", range(self.pages, self.pages + len(tokens)))
        self.pages += len(tokens)
        node, _ = self.tree.insert(key(*tokens), pages)
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


@pytest.mark.parametrize(("name", "kind"), [("lru", LRU), ("foresight", Foresight)])
def test_policies_by_name(name, kind):
    policy = make_policy(name, 70)
    assert type(policy) is kind
    assert kind is not Foresight or policy._most_ghosts == 70 + 4096


# -- all of them -------------------------------------------------------------------------------------------------


def test_the_option_offers_every_policy():
    option = CacheConfig.model_fields["eviction_policy"].annotation
    assert get_args(option) == POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_the_uses_that_ran_through_a_node(policy):
    """Against a list of all uses, over random insertions, cuts, uses and evictions."""
    draw, tree, pages = random.Random(7), RadixTree(1, make_policy(policy, 60)), iter(range(10**6))
    uses: dict[tuple[int, ...], int] = {}  # by the prefix that a page ends
    for _ in range(3_000):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 9))]
        match = tree.match(key(*tokens))
        node = tree.lock_match(match)
        if draw.random() < 0.7:
            tree.use(node)
            for end in range(1, len(match.pages) + 1):
                uses[tuple(tokens[:end])] += 1
            tree.insert(key(*tokens), array("i", [next(pages) for _ in tokens]))
            for end in range(len(match.pages) + 1, len(tokens) + 1):
                uses[tuple(tokens[:end])] = 0
        tree.unlock(node)
        if tree.num_pages > 60:
            tree.evict(draw.randrange(1, 20))
        for one in tree.nodes():
            prefix, above = [], one
            while above is not None:
                prefix[:0] = array("i", above.key)
                above = above.parent
            assert one.hits == uses[tuple(prefix)]
            assert one.hits == uses[tuple(prefix[: len(prefix) - len(one.pages) + 1])]
