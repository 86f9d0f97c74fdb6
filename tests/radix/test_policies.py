"""The policies by hand: each one's order of victims, step by step, on nodes of a real tree."""

import random
from array import array
from typing import get_args

import pytest

from radix import POLICIES, Namespace, make_policy
from radix.eviction import LRU, Order
from radix.foresight import Foresight
from radix.node import Node
from runtime.config import CacheConfig
from tests.radix.trees import Tree, key


def leaf() -> Node:
    return Node(key(1), array("i", [0]), Node(b"", array("i"), None, Namespace()), Namespace())


def test_entries_that_do_not_hold_are_cleared_away_in_time():
    """Memory follows the nodes, however often they are used."""
    order, nodes = Order(), [leaf() for _ in range(10)]
    longest = 0
    for i in range(5_000):
        order.push(float(i), nodes[i % 10])
        longest = max(longest, len(order._heap))
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


def test_lru_goes_by_the_last_use():
    tree = Tree(policy=LRU())
    nodes = [tree.add(i) for i in range(4)]
    tree.use(nodes[1])
    tree.use(nodes[0])
    tree.touch(nodes[2])
    assert list(tree.evict(5)) == [3, 1, 0, 2]


@pytest.mark.parametrize(("name", "kind"), [("lru", LRU), ("foresight", Foresight)])
def test_policies_by_name(name, kind):
    assert type(make_policy(name, 70)) is kind


def test_the_option_offers_every_policy():
    option = CacheConfig.model_fields["eviction_policy"].annotation
    assert get_args(option) == POLICIES
