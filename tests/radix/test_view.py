"""The tree as somebody looks at it."""

from __future__ import annotations

from array import array

from radix import Namespace, RadixTree, view

A, B = Namespace("a"), Namespace("b")


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def make_tree() -> RadixTree:
    clock = iter(range(1_000_000))
    tree = RadixTree(2, clock=lambda: float(next(clock)))
    tree.insert(key(1, 2, 3, 4, 5, 6), array("i", [0, 1, 2]), A, cost=3.0)
    tree.insert(key(1, 2, 7, 8), array("i", [0, 3]), A)
    tree.insert(key(1, 2), array("i", [9]), B)
    return tree


def test_every_field():
    tree = make_tree()
    tree.pin(tree.acquire(tree.match(key(1, 2, 7, 8), A)))
    nodes = {node.id: node for node in view(tree, preview_tokens=3)}
    assert set(nodes) == {0, 1, 3, 9}
    top, left, right, other = (nodes[i] for i in (0, 1, 3, 9))
    assert (top.parent, top.depth, top.start, top.tokens, top.pages, top.children) == (None, 1, 0, 2, 1, 2)
    assert (left.parent, left.depth, left.start, left.tokens, left.pages, left.children) == (0, 2, 2, 4, 2, 0)
    assert (left.preview, right.preview, other.preview) == (key(3, 4, 5), key(7, 8), key(1, 2))
    assert (right.hits, left.hits, right.locked, right.pinned, left.locked) == (1, 0, True, True, False)
    assert (top.cost_s, left.cost_s) == (1.0, 2.0)
    assert right.idle_s < right.age_s
    assert other.namespace == B


def test_levels_pages_and_namespaces():
    tree = make_tree()
    assert {node.id for node in view(tree, max_depth=1)} == {0, 9}
    assert {node.id for node in view(tree, lambda namespace: namespace == B)} == {9}
    whole = view(tree)
    assert [node.depth for node in whole] == sorted(node.depth for node in whole)
    assert [view(tree, skip=i, limit=1)[0].id for i in range(4)] == [node.id for node in whole]
    assert view(tree, skip=4) == []


class Counting(dict):
    """Children that note how many were taken."""

    taken = 0

    def values(self):
        for value in super().values():
            Counting.taken += 1
            yield value


def test_a_part_of_a_large_tree_costs_what_is_asked_for():
    tree = RadixTree(1)
    for i in range(2_000):
        tree.insert(key(i, 1), array("i", [2 * i, 2 * i + 1]))
    ((_, root),) = tree.roots()
    root.children = Counting(root.children)
    assert len(view(tree, limit=10)) == 10
    assert Counting.taken <= 11
