"""Nodes: their children and the comparison of runs."""

import random
from array import array

import pytest

from radix import Namespace
from radix.node import Node, common_tokens
from tests.radix.trees import key


def make_node(*tokens: int, parent: Node | None = None) -> Node:
    return Node(key(*tokens), array("i", range(len(tokens))), parent, Namespace())


def parent_of(*first_pages: tuple[int, ...]) -> Node:
    parent = make_node(0)
    for tokens in first_pages:
        parent.attach(key(*tokens), make_node(*tokens, parent=parent))
    return parent


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 33])
def test_common_tokens_up_to_each_difference(length):
    run = list(range(1, length + 1))
    for same in range(length + 1):
        asked = [*run[:same], *[0] * (length - same)]
        assert common_tokens(key(*asked), 0, key(*run)) == same
        assert common_tokens(key(9, 9, *asked), 8, key(*run)) == same
        assert common_tokens(key(*asked[:same]), 0, key(*run)) == same, "the key ends within the run"
        assert common_tokens(key(*asked, 5), 0, key(*run[:same])) == same, "the run is shorter"


def test_common_tokens_are_whole_and_begin_at_the_first():
    assert common_tokens(key(1 << 24, 2), 0, key(2 << 24, 2)) == 0, "three of four bytes are equal"
    assert common_tokens(key(7, 2, 3), 0, key(1, 2, 3)) == 0
    assert common_tokens(b"", 0, key(1)) == common_tokens(key(1), 4, key(1)) == common_tokens(key(1), 0, b"") == 0


def test_an_only_child_is_known():
    parent = parent_of()
    first, second = make_node(1), make_node(2)
    parent.attach(key(1), first)
    assert parent.only is first
    parent.attach(key(2), second)
    assert parent.only is None
    parent.detach(key(1))
    assert parent.only is second
    other = make_node(2)
    parent.attach(key(2), other)
    assert (parent.only, list(parent.children.values())) == (other, [other])
    parent.detach(key(2))
    assert (parent.only, parent.children) == (None, {})


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_the_closest_child_shares_most_however_many_there_are(count):
    draw = random.Random(count)
    pages = {tuple(draw.randrange(3) for _ in range(6)) for _ in range(count)}
    parent = parent_of(*pages)
    for _ in range(200):
        wanted = [draw.randrange(3) for _ in range(draw.randrange(1, 7))]
        child, tokens = parent.closest_child(key(*wanted))
        best = max(common_tokens(key(*wanted), 0, key(*page)) for page in pages)
        assert tokens == best
        assert child is None if not best else common_tokens(key(*wanted), 0, child.key) == best
    assert (parent.order is not None) == (len(pages) >= 9)


def test_sorted_children_follow_comings_and_goings():
    pages = [(i, i) for i in range(12)]
    parent = parent_of(*pages)
    assert parent.closest_child(key(3, 0))[1] == 1
    assert list(parent.order) == sorted(parent.children)
    parent.detach(key(3, 3))
    assert parent.closest_child(key(3, 0)) == (None, 0)
    for _ in range(2):  # the second one takes the first one's place
        parent.attach(key(20, 20), make_node(20, 20))
        assert list(parent.order) == sorted(parent.children)
        assert len(parent.order) == 12
