"""Eviction policies: a controlled clock, each policy's own promise, and uses counted once."""

from __future__ import annotations

import random
from array import array
from typing import get_args

import pytest

from radix import POLICIES, RadixTree, make_policy
from runtime.config import CacheConfig


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Cache:
    """A cache of a fixed number of pages of one token, over a tree."""

    def __init__(self, pages: int, policy: str = "lru"):
        self.now = 0.0
        self.free = list(range(pages))
        self.tree = RadixTree(1, make_policy(policy, pages), lambda: self.now)

    def ask(self, *tokens: int, cost: float = 0.0) -> int:
        """Serve a prompt; how many of its tokens were cached."""
        match = self.tree.match(key(*tokens))
        node = self.tree.lock_match(match)
        self.tree.use(node)
        need = len(tokens) - len(match.pages)
        if need > len(self.free):
            self.free.extend(self.tree.evict(need - len(self.free)))
        fresh = [self.free.pop() for _ in range(need)]
        self.tree.insert(key(*tokens), match.pages + array("i", fresh), cost=cost)
        self.tree.unlock(node)
        return len(match.pages)

    def cached(self, *tokens: int) -> int:
        return len(self.tree.match(key(*tokens)).pages)


HOT, RARE = (1, 2, 3, 4), (5, 6, 7, 8)


def flood(cache: Cache, count: int = 20) -> None:
    for i in range(count):
        cache.now += 0.1
        cache.ask(100 + i, 200 + i)


def test_a_pin_keeps_a_hot_prompt_that_is_idle_for_a_while():
    cache = Cache(12)
    for _ in range(5):
        cache.ask(*HOT)
    node = cache.tree.lock_match(cache.tree.match(key(*HOT)))
    cache.tree.pin(node)
    cache.tree.unlock(node)
    flood(cache)
    assert cache.cached(*HOT) == 4
    cache.tree.unpin(node)
    flood(cache)
    assert cache.cached(*HOT) == 0


def test_what_is_seen_of_evictions():
    cache = Cache(8)
    cache.ask(*HOT)
    cache.now = 5.0
    cache.ask(*HOT)
    cache.now = 45.0
    cache.ask(*RARE)
    cache.ask(9)
    cache.tree.flush()
    stats = cache.tree.stats
    assert stats.evicted == {"room": 1, "quota": 0, "flush": 8}
    assert stats.reuse_gap_s.total == 5.0
    assert stats.idle_s.total == 4 * 40.0
    assert stats.lifetime_s.total == 4 * 45.0
    assert sum(stats.idle_s.counts) == 9
    assert stats.idle_s.counts[stats.idle_s.bounds.index(60.0)] == 4


def test_what_is_used_often_survives_a_scan():
    cache, plain = Cache(20, "gdsf"), Cache(20)
    for one in (cache, plain):
        for _ in range(6):
            one.ask(*HOT, cost=4.0)
            one.ask(300 + _, 400, cost=2.0)
        for i in range(40):
            one.ask(500 + i, 600 + i, cost=2.0)
    assert cache.cached(*HOT) == 4
    assert plain.cached(*HOT) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_round_gives_every_page_back(policy):
    cache = Cache(50, policy)
    for i in range(200):
        cache.ask(i % 3, i % 7, i % 11, i)
    assert len(cache.tree.flush()) + len(cache.free) == 50
    assert cache.tree.num_nodes == 0
    cache.tree.check()


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


def test_cuts_of_a_run_make_no_hits():
    tree = RadixTree(1)
    tree.insert(key(*range(32)), array("i", range(32)))
    for end in range(31, 0, -1):
        tree.unlock(tree.lock_match(tree.match(key(*range(end)))))
    assert tree.num_nodes == 32
    node = tree.lock_match(tree.match(key(*range(32))))
    tree.use(node)
    tree.unlock(node)
    assert len(tree.evict(31)) == 31
    assert [node.hits for node in tree.nodes()] == [1]
