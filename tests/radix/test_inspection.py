"""Views and outlines: every field, pages of a tree, sums, and a tree that changes under the walk."""

import random
from array import array
from itertools import count

import pytest

from radix import Namespace, RadixTree, make_policy
from radix.inspection import outline, slices, view
from tests.radix.trees import Tree, key

A, B = Namespace("a"), Namespace("b")

PAGE = 4


def chain_of(node):
    """A node and those below it that an outline shows as one with it."""
    chain = [node]
    while len(node.children) == 1:
        (child,) = node.children.values()
        if (node.hits, node.pins > 0) != (child.hits, child.pins > 0) or node.meta is not child.meta:
            break
        chain.append(node := child)
    return chain


def finish(walk, between=lambda step: None):
    """All of a walk, with a call between two steps; its result and the number of steps."""
    for step in count():
        try:
            next(walk)
        except StopIteration as end:
            return end.value, step
        between(step)


@pytest.fixture
def filled():
    return Tree(PAGE)


def grow(filled, count, seed=1):
    """Prompts that share beginnings."""
    rng = random.Random(seed)
    heads = [[rng.randrange(50) for _ in range(PAGE * rng.randrange(1, 5))] for _ in range(6)]
    for _ in range(count):
        head = rng.choice(heads)
        tail = [rng.randrange(50) for _ in range(PAGE * rng.randrange(1, 6))]
        filled.add(*head, *tail, namespace=rng.choice([A, B]))
    return filled


def test_everything_is_shown_where_there_is_room(filled):
    tree = grow(filled, 200)
    for number, node in enumerate(list(tree.nodes())[::3]):
        tree.use(node)
        node.meta = Record(number)
    shown, _ = finish(outline(tree, 10**6, preview_tokens=2))
    nodes = {node.pages[0]: node for node in tree.nodes()}
    blocks = [block for block in shown if block.id >= 0]
    chains = {block.id: chain_of(nodes[block.id]) for block in blocks}
    assert sorted(node.pages[0] for chain in chains.values() for node in chain) == sorted(nodes)
    for block in blocks:
        node, end = chains[block.id][0], chains[block.id][-1]
        assert block.tokens == sum(len(one.pages) for one in chains[block.id]) * PAGE
        assert block.chained == len(chains[block.id])
        assert block.end == (end.pages[0], block.start + block.tokens - len(end.pages) * PAGE)
        assert block.preview == node.key[:8]
        assert (block.namespace, block.hits) == (node.namespace, node.hits)
        assert block.meta == (None if node.meta is None else node.meta.describe())
        above, before = node.parent, 0
        while above is not None:
            before += len(above.pages) * PAGE
            above = above.parent
        assert block.start == before
    roots = [block for block in shown if block.parent is None]
    assert {root.namespace for root in roots} == {A, B}
    assert sum(root.total for root in roots) == tree.num_pages * PAGE
    assert sum(root.nodes for root in roots) == tree.num_nodes


def test_slices_have_every_node_once_behind_its_parent(filled):
    tree = grow(filled, 900)
    found = [pair for part in slices(tree) for pair in part]
    assert sorted(node.pages[0] for node, _ in found) == sorted(node.pages[0] for node in tree.nodes())
    ends = {root: 0 for _, root in tree.roots()}
    for node, start in found:
        assert ends[node.parent] == start
        ends[node] = start + len(node.pages) * PAGE
    assert {node.namespace for part in slices(tree, lambda space: space == B) for node, _ in part} == {B}
    many = list(slices(tree))
    assert [len(part) for part in many[:-1]] == [1024] * (len(many) - 1)
    assert list(slices(tree, lambda space: False)) == []
    walk = slices(tree)
    next(walk)
    tree.flush()
    assert all(node.pages for part in walk for node, _ in part)


@pytest.mark.parametrize("limit", [1, 3, 20, 75])
def test_the_heaviest_are_shown_and_their_parents_before_them(filled, limit):
    tree = grow(filled, 300)
    everything, _ = finish(outline(tree, 10**6))
    shown, _ = finish(outline(tree, limit))
    assert len(shown) == limit
    assert {block.namespace for block in finish(outline(tree, limit, wanted=lambda space: space == B))[0]} == {B}
    for i, block in enumerate(shown):
        if block.parent is None:
            assert block.id == -1
        else:
            above = shown[block.parent]
            assert block.parent < i
            assert (above.namespace, above.start + above.tokens) == (block.namespace, block.start)
            assert above.total >= above.tokens + block.total
    lightest = min(block.total for block in shown)
    hidden = sorted((block.total for block in everything), reverse=True)[limit:]
    assert lightest >= max(hidden, default=0)


def test_a_large_tree_is_walked_in_steps_and_may_change_meanwhile(filled):
    tree, rng = filled, random.Random(3)
    for number in range(4000):
        filled.add(number % 97, 1, 1, 1, number, 2, 2, 2)
    most = tree.num_nodes // 1024

    def change(step):
        tree.evict(rng.randrange(400))
        filled.add(rng.randrange(97), 1, 1, 1, 10**6 + step, 3, 3, 3)

    shown, steps = finish(outline(tree, 300), change)
    assert most <= steps <= 2 * most + 2, "a pause after a thousand nodes, on both ways"
    assert len(shown) == 300
    tree.check()


class Record:
    def __init__(self, number: int):
        self.number = number

    def describe(self):
        return {"number": self.number}


def make_tree() -> RadixTree:
    clock = iter(range(1_000_000))
    tree = RadixTree(2, clock=lambda: float(next(clock)))
    tree.insert(key(1, 2, 3, 4, 5, 6), array("i", [0, 1, 2]), A, cost=3.0)
    tree.insert(key(1, 2, 7, 8), array("i", [0, 3]), A, meta=Record(7))
    tree.insert(key(1, 2), array("i", [9]), B)
    return tree


def test_every_field():
    tree = make_tree()
    node = tree.lock_match(tree.match(key(1, 2, 7, 8), A))
    tree.use(node)
    tree.pin(node)
    nodes = {node.id: node for node in view(tree, preview_tokens=3)}
    assert set(nodes) == {0, 1, 3, 9}
    top, left, right, other = (nodes[i] for i in (0, 1, 3, 9))
    assert (top.parent, top.depth, top.start, top.tokens, top.pages, top.children) == (None, 1, 0, 2, 1, 2)
    assert (left.parent, left.depth, left.start, left.tokens, left.pages, left.children) == (0, 2, 2, 4, 2, 0)
    assert (left.preview, right.preview, other.preview) == (key(3, 4, 5), key(7, 8), key(1, 2))
    assert (top.hits, left.hits) == (1, 0)
    assert (right.hits, left.hits, right.locked, right.pinned, left.locked) == (1, 0, True, True, False)
    assert (top.cost_s, left.cost_s) == (1.0, 2.0)
    assert top.idle_s == right.idle_s < right.age_s < left.idle_s
    assert other.namespace == B
    assert (right.meta, left.meta, top.meta) == ({"number": 7}, None, None)


def test_what_the_policy_expects_is_shown():
    tree = RadixTree(1, make_policy("foresight", 9))
    tree.insert(key(1, 2), array("i", [0, 1]))
    tree.insert(key(1, 3), array("i", [0, 2]))
    blocks = finish(outline(tree, 9))[0]
    seen = {node.id: node.outlook for node in view(tree)}
    assert [seen[i].kind for i in (0, 1, 2)] == ["first turn"] * 3
    assert (seen[2].age, seen[1].age) == (0, 1)
    assert {block.id: block.outlook for block in blocks} == {-1: None, **seen}
    assert {node.outlook for node in view(make_tree())} == {None}


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

    def values(self):
        self.taken = 0
        for value in super().values():
            self.taken += 1
            yield value


def test_a_part_of_a_large_tree_costs_what_is_asked_for():
    tree = RadixTree(1)
    for i in range(2_000):
        tree.insert(key(i, 1), array("i", [2 * i, 2 * i + 1]))
    ((_, root),) = tree.roots()
    root.children = children = Counting(root.children)
    assert len(view(tree, limit=10)) == 10
    assert children.taken <= 11


def timed() -> Tree:
    """A trunk and its two branches."""
    tree = Tree()
    tree.time = 10.0
    tree.add(1, 2)
    tree.time = 12.0
    tree.add(1, 3)
    return tree


def test_seconds():
    tree = timed()
    tree.time = 12.25
    assert [(node.idle_s, node.age_s) for node in view(tree)] == [(2.25, 2.25), (2.25, 2.25), (0.25, 0.25)]
    blocks = finish(outline(tree, 9))[0]
    assert sorted((block.id, block.idle_s) for block in blocks) == [(-1, 0.25), (0, 0.25), (1, 2.25), (3, 0.25)]
    tree.time = 11.0
    assert [(node.idle_s, node.age_s) for node in view(tree)] == [(1.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
    assert {block.idle_s for block in finish(outline(tree, 9))[0]} == {0.0, 1.0}, "nothing is used in the future"


def test_one_lock_is_a_lock_and_none_is_none():
    tree = timed()
    node = tree.match(key(1, 2)).node
    tree.lock(node)
    assert [(one.locked, one.pinned) for one in view(tree)] == [(True, False), (True, False), (False, False)]
    tree.unlock(node)
    tree.pin(node)
    assert [(one.locked, one.pinned) for one in view(tree)] == [(False, True), (False, True), (False, False)]
    tree.lock(node)
    blocks = {block.id: (block.locked, block.pinned) for block in finish(outline(tree, 9))[0]}
    assert blocks == {-1: (True, False), 0: (True, True), 1: (True, True), 3: (False, False)}


def test_a_run_that_came_in_chunks_is_one_block(filled):
    tree, tokens = filled, list(range(12))
    chunks = [filled.add(*tokens[:stop]) for stop in (4, 8, 12)]
    for node, cost in zip(chunks, (1.0, 2.0, 4.0), strict=True):
        node.cost = cost
    (root, block), _ = finish(outline(tree, 9, preview_tokens=6))
    assert (block.id, block.end, block.tokens, block.chained, block.nodes) == (0, (chunks[2].pages[0], 8), 12, 3, 3)
    assert (block.cost_s, block.preview, root.hits) == (7.0, key(*tokens[:6]), 0)
    tree.use(chunks[1])
    shown, _ = finish(outline(tree, 9))
    assert [(one.tokens, one.hits) for one in shown] == [(0, 1), (8, 1), (4, 0)], "parted where a use ended"
    tree.pin(chunks[0])
    shown, _ = finish(outline(tree, 9))
    assert [(one.tokens, one.pinned) for one in shown] == [(0, False), (4, True), (4, False), (4, False)]
    filled.add(0, 1, 2, 3, 9, 9, 9, 9)
    shown, _ = finish(outline(tree, 9))
    assert sorted(one.tokens for one in shown) == [0, 4, 4, 4, 4]
