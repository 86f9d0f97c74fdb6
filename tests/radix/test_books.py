"""The tree's books by hand: locks, pins, costs, times and what is counted of uses and evictions."""

from array import array

import pytest

from radix import POLICIES, Match, Namespace, Quotas, make_policy, path
from radix.node import Node
from radix.stats import Histogram
from tests.radix.trees import Tree, key

A = Namespace("a")


def forked() -> tuple[Tree, Node, Node, Node]:
    """A trunk of three pages with branches of two and four; the branches, then the trunk."""
    tree = Tree()
    left = tree.add(1, 2, 3, 4, 5)
    right = tree.add(1, 2, 3, 6, 7, 8, 9)
    return tree, left, right, right.parent


# -- matching ----------------------------------------------------------------------------------------------------


def test_every_field_of_a_match():
    tree = Tree(page_size=2)
    node = tree.add(1, 2, 3, 4, 5, 6)
    assert tree.find(1, 2, 3, 4, 5, 6) == Match(array("i", [0, 1, 2]), node, 3)
    assert tree.find(1, 2, 3, 4, 5, 6, 7, 8, 9) == Match(array("i", [0, 1, 2]), node, 3)
    assert tree.find(1, 2, 3, 4, 5) == Match(array("i", [0, 1]), node, 2, 2, 1, node)
    assert tree.find(1, 2, 3, 9) == Match(array("i", [0]), node, 1, 1, 1, node)
    assert tree.find(1, 9) == Match(array("i"), None, 0, 0, 1, node)
    assert tree.find(9) == tree.find() == Match()
    below = tree.add(1, 2, 3, 4, 5, 6, 7, 8)
    tree.add(1, 2, 3, 4, 5, 6, 9, 9)
    assert tree.find(1, 2, 3, 4, 5, 6, 7, 3) == Match(array("i", [0, 1, 2]), node, 3, 6, 1, below)
    assert tree.find(1, 2, 3, 4, 5, 6, 4, 8) == Match(array("i", [0, 1, 2]), node, 3)


def test_what_matches_is_the_caller_s_own():
    tree = Tree()
    tree.add(1, 2, 3)
    tree.find(1, 2, 3).pages.append(9)
    assert list(tree.find(1, 2, 3).pages) == [0, 1, 2]


def test_an_insertion_of_nothing_and_of_more_tokens_than_pages():
    tree = Tree(page_size=2)
    assert tree.insert(key(1, 2), array("i")) == (None, array("i"))
    assert (tree.num_nodes, list(tree.roots())) == (0, [])
    node, held = tree.insert(key(1, 2, 3, 4, 5, 6, 7), array("i", [8, 9]))
    assert (node.key, list(node.pages), list(held), tree.num_pages) == (key(1, 2, 3, 4), [8, 9], [8, 9], 2)
    again, held = tree.insert(key(1, 2), array("i", [5]))
    assert (list(held), again.key, node.parent) == ([8], key(1, 2), again)


# -- locks -------------------------------------------------------------------------------------------------------


def test_nothing_to_lock_or_to_unlock():
    tree = Tree()
    assert tree.locked(1) is None
    tree.lock(None)
    tree.unlock(None)
    tree.use(None)
    tree.touch(None)
    assert (tree.num_locked_pages, sum(tree.stats.reuse_gap_s.counts)) == (0, 0)


def test_an_unlock_too_many_is_noticed():
    tree, left, *_ = forked()
    with pytest.raises(AssertionError, match="unlock without lock"):
        tree.unlock(left)
    with pytest.raises(AssertionError, match="unpin without pin"):
        tree.unpin(left)


# -- records -----------------------------------------------------------------------------------------------------


def test_a_cost_is_divided_with_its_run():
    tree = Tree()
    node = tree.add(1, 2, 3, 4, 5, cost=10.0, meta="record")
    tree.locked(1, 2)
    upper = node.parent
    assert (upper.cost, node.cost, upper.meta, node.meta) == (4.0, 6.0, "record", "record")
    assert (upper.last_use, upper.created_s, upper.owner) == (node.last_use, node.created_s, node.owner) != (0, 0, None)
    tree.evict(1)
    assert (node.cost, node.key, list(node.pages)) == (4.0, key(3, 4), [2, 3])
    other = tree.add(1, 2, 7, cost=3.0)
    assert (other.cost, other.meta, upper.cost) == (3.0, None, 4.0), "what was there keeps its own"
    assert tree.add(8).cost == 0.0


def test_times_and_hits_of_a_path():
    tree = Tree()
    tree.time = 10.0
    left = tree.add(1, 2, 3)
    tree.time = 20.0
    right = tree.add(1, 2, 4)
    trunk = right.parent
    assert [node.created_s for node in (trunk, left, right)] == [10.0, 10.0, 20.0]
    assert [node.used_s for node in (trunk, left, right)] == [10.0, 10.0, 20.0]
    tree.time = 26.0
    tree.use(right)
    assert [node.used_s for node in (trunk, left, right)] == [26.0, 10.0, 26.0]
    assert [node.hits for node in (trunk, left, right)] == [1, 0, 1]
    assert tree.stats.reuse_gap_s.total == 6.0
    tree.time = 27.0
    tree.touch(left)
    assert (left.used_s, left.hits, trunk.used_s) == (27.0, 0, 26.0)
    assert sum(tree.stats.reuse_gap_s.counts) == 1
    assert tree.now() == 27.0
    lower = tree.add(1, 2, 3, 9).parent
    tree.locked(1)
    assert [(node.hits, node.used_s) for node in path(lower)][-2:] == [(1, 26.0), (1, 26.0)], "a cut keeps both"


def test_a_parent_enters_with_the_recency_of_its_last_child():
    tree = Tree()
    tree.add(1, 2)
    child = tree.add(1, 2, 3)
    old = tree.add(20)
    tree.touch(child)
    tree.drop(child)
    assert list(tree.evict(1)) == list(old.pages)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_parent_takes_over_the_time_of_children_that_leave(policy):
    tree = Tree(policy=make_policy(policy, 20))
    left, right = tree.add(1, 2, cost=1.0), tree.add(1, 3, cost=1.0)
    tree.time = 60.0
    tree.touch(left)
    trunk = right.parent
    tree.drop(left)
    assert (trunk.used_s, trunk.last_use) == (60.0, left.last_use)
    tree.drop(right)
    assert (trunk.used_s, trunk.last_use) == (60.0, left.last_use)


# -- evictions ---------------------------------------------------------------------------------------------------


def test_evictions_are_booked_by_page():
    tree = Tree(quotas=Quotas({"a": 9}))
    tree.time = 10.0
    tree.add(1, 2, 3, namespace=A)
    tree.time = 14.0
    tree.use(tree.find(1, 2, 3, namespace=A).node)
    tree.time = 15.0
    assert list(tree.evict(2)) == [1, 2]
    stats = tree.stats
    assert (stats.idle_s.total, sum(stats.idle_s.counts)) == (2 * 1.0, 2)
    assert (stats.lifetime_s.total, sum(stats.lifetime_s.counts)) == (2 * 5.0, 2)
    assert (tree.num_pages, tree.num_nodes, tree.quotas.pages(A)) == (1, 1, 1)
    assert list(tree.flush()) == [0]
    assert (tree.num_pages, tree.num_nodes, tree.quotas.pages(A)) == (0, 0, 0)
    assert stats.evicted == {"room": 2, "quota": 0, "flush": 1}


def test_a_trunk_goes_after_its_branches_and_then_its_namespace():
    tree = Tree()
    tree.add(1, 2, 3, namespace=A)
    tree.add(1, 2, 4, namespace=A)
    tree.add(1, 5)
    assert {namespace for namespace, _ in tree.roots()} == {A, Namespace()}
    assert list(tree.evict(2)) == [2, 5]
    assert [tuple(node.key) for node in tree.nodes() if node.namespace == A] == [tuple(key(1, 2))]
    tree.evict(4)
    assert list(tree.roots()) == []
    tree.add(1, namespace=A)
    assert [namespace for namespace, _ in tree.roots()] == [A]


def test_dropping_a_node_spares_what_is_above_and_beside_it():
    tree, _, right, trunk = forked()
    tree.lock(right)
    assert sorted(tree.drop(trunk)) == [3, 4]
    assert list(tree.drop(right)) == []
    tree.unlock(right)
    other = tree.add(1, 2, 3, 4)
    assert sorted(tree.drop(right)) == [8, 9, 10, 11]
    assert (tree.num_pages, other.parent) == (4, trunk)
    assert len(tree.drop(trunk)) == 4
    assert tree.stats.evicted == {"room": 0, "quota": 0, "flush": 10}


def test_nodes_come_after_their_parents_and_a_path_ends_below_the_root():
    tree, left, right, trunk = forked()
    nodes = list(tree.nodes())
    assert (nodes[0], {left, right}) == (trunk, set(nodes[1:]))
    assert list(path(left)) == [left, trunk]
    assert list(path(trunk.parent)) == list(path(None)) == []


# -- checks ------------------------------------------------------------------------------------------------------

DAMAGE = {
    "nodes": lambda tree, left, right: setattr(tree, "num_nodes", 4),
    "pages": lambda tree, left, right: setattr(tree, "num_pages", 8),
    "locked pages": lambda tree, left, right: setattr(tree, "num_locked_pages", 1),
    "pinned pages": lambda tree, left, right: setattr(tree, "num_pinned_pages", 1),
    "a page twice": lambda tree, left, right: left.pages.__setitem__(0, right.pages[0]),
    "a key too long": lambda tree, left, right: setattr(left, "key", left.key + key(9)),
    "a wrong place": lambda tree, left, right: setattr(left, "key", key(8, 8)),
    "a lost order": lambda tree, left, right: setattr(left.parent, "order", [key(4)]),
    "no locks above": lambda tree, left, right: (setattr(left, "refs", 1), setattr(tree, "num_locked_pages", 2)),
    "no pins above": lambda tree, left, right: (
        tree.lock(left), setattr(left, "pins", 1), setattr(tree, "num_pinned_pages", 2)
    ),
    "pins without locks": lambda tree, left, right: (
        tree.pin(left), setattr(left, "refs", 0), setattr(left.parent, "refs", 0), setattr(tree, "num_locked_pages", 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_books_are_noticed(name):
    tree, left, right, _ = forked()
    tree.check()
    DAMAGE[name](tree, left, right)
    with pytest.raises((AssertionError, KeyError)):
        tree.check()


def test_a_histogram():
    histogram = Histogram((1.0, 5.0))
    for value, times in ((0.0, 1), (1.0, 2), (1.1, 4), (5.0, 8), (5.1, 16)):
        histogram.add(value, times)
    histogram.add(0.5)
    assert histogram.counts == [4, 12, 16]
    assert histogram.total == pytest.approx(0.5 + 2.0 + 4.4 + 40.0 + 81.6)
    assert len(Histogram().counts) == len(Histogram().bounds) + 1
