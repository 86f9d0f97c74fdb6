"""A tenant over its quota gives up its own pages, and nobody else's."""

from __future__ import annotations

from array import array

import pytest

from radix import POLICIES, Hold, Quotas, RadixTree, make_policy, tenant_of


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.fixture
def now():
    return [0.0]


def make_tree(now, policy: str = "lru", hold: float = 0.0) -> RadixTree:
    quotas = Quotas({"a": 4, "b": 100})
    return RadixTree(1, make_policy(policy, 1000), lambda: now[0], Hold(hold), quotas=quotas)


def add(tree: RadixTree, namespace: str, *tokens: int, first: int) -> list[int]:
    """Insert as an engine does: make room first; the pages that were given up."""
    gone = list(tree.make_room(namespace, len(tokens)))
    tree.insert(key(*tokens), array("i", range(first, first + len(tokens))), namespace)
    return gone


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tenant_pays_for_itself(now, policy):
    tree = make_tree(now, policy)
    add(tree, "b/", 1, 2, 3, first=0)
    add(tree, "a/", 1, 2, first=10)
    add(tree, "a/salt", 3, 4, first=20)
    assert tree.quotas.pages("a/other") == 4, "salts of a tenant count together"
    assert add(tree, "a/", 5, first=30) == [11], "the least recently used, from its end"
    assert (tree.quotas.pages("a/"), tree.quotas.pages("b/")) == (4, 3)
    assert tree.stats.evicted["quota"] == 1
    for i in range(100):
        add(tree, "a/", 50 + i, 60 + i, first=100 + 2 * i)
    assert tree.quotas.pages("a/") == 4
    assert len(tree.match(key(1, 2, 3), "b/").pages) == 3
    tree.check()
    assert len(tree.flush()) == 7
    assert tree.quotas.pages("a/") == tree.quotas.pages("b/") == 0


def test_what_is_in_use_stays_until_it_is_not(now):
    tree = make_tree(now)
    add(tree, "a/", 1, 2, 3, 4, first=0)
    node = tree.acquire(tree.match(key(1, 2, 3, 4), "a/"))
    assert add(tree, "a/", 9, first=10) == []
    assert list(tree.make_room("a/", 0)) == [10], "over the quota, and nothing else can go"
    add(tree, "a/", 8, first=11)
    tree.unlock(node)
    tree.touch(node)
    assert list(tree.make_room("a/", 0)) == [11]
    tree.check()


def test_a_hold_is_broken_only_if_nothing_else_can_go(now):
    tree = make_tree(now, hold=10.0)
    add(tree, "a/", 1, 2, first=0)
    now[0] = 11.0
    add(tree, "a/", 3, 4, first=10)
    assert add(tree, "a/", 5, first=20) == [1]
    assert add(tree, "a/", 6, 7, first=30) == [0, 11]
    tree.check()


def test_tenants_without_a_limit_are_free(now):
    tree = make_tree(now)
    for i in range(50):
        assert add(tree, "c/", i, first=i) == []
    assert tree.num_pages == 50


def test_a_tenant_is_the_part_before_the_slash():
    assert tenant_of("abc/salt/x") == "abc"
    assert tenant_of("abc/") == "abc"
    assert tenant_of("/salt") == "/salt", "nobody is named: every salt is a tenant"
    assert tenant_of("") == ""
