"""Eviction policies: the article's cases with a controlled clock, and each policy's own promise."""

from __future__ import annotations

from array import array
from typing import get_args

import pytest

from radix import POLICIES, Hold, RadixTree, make_policy
from runtime.config import CacheConfig


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Cache:
    """A cache of a fixed number of pages of one token, over a tree."""

    def __init__(self, pages: int, policy: str = "lru", hold: float = 0.0, by_cost: bool = False, ttl: float = 1e9):
        self.now = 0.0
        self.free = list(range(pages))
        self.tree = RadixTree(1, make_policy(policy, pages, ttl), lambda: self.now, Hold(hold, by_cost))

    def ask(self, *tokens: int, cost: float = 0.0) -> int:
        """Serve a prompt; how many of its tokens were cached."""
        match = self.tree.match(key(*tokens))
        node = self.tree.acquire(match)
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


def test_a_hot_prompt_that_is_idle_for_a_while_survives_because_it_is_pinned():
    cache = Cache(12)
    for _ in range(5):
        cache.ask(*HOT)
    node = cache.tree.acquire(cache.tree.match(key(*HOT)))
    cache.tree.pin(node)
    cache.tree.unlock(node)
    flood(cache)
    assert cache.cached(*HOT) == 4
    cache.tree.unpin(node)
    flood(cache)
    assert cache.cached(*HOT) == 0


def test_an_expensive_rare_prompt_survives_a_flood_because_it_is_held():
    cache = Cache(12, hold=1.0)
    cache.ask(*RARE, cost=9.0)
    cache.tree.hold = Hold()
    flood(cache, 9)
    assert cache.cached(*RARE) == 4, "its hold is not over"
    flood(cache, 9)
    assert cache.cached(*RARE) == 0, "it is now"
    assert cache.tree.num_broken_holds == 0


def test_without_either_lru_evicts_both():
    cache = Cache(12)
    for _ in range(5):
        cache.ask(*HOT)
    cache.ask(*RARE)
    flood(cache)
    assert cache.cached(*HOT) == cache.cached(*RARE) == 0


def test_a_live_request_wins_over_the_oldest_hold():
    cache = Cache(8, hold=100.0)
    cache.ask(*HOT)
    cache.now = 1.0
    cache.ask(*RARE)
    assert cache.ask(9, 9) == 0
    assert (cache.cached(*HOT), cache.cached(*RARE)) == (2, 4), "the older one yields, from its end"
    assert cache.tree.num_broken_holds == 1


def test_a_hold_by_cost_is_longer_for_what_is_dearer():
    cache = Cache(8, hold=1.0, by_cost=True)
    cache.ask(1, 2, cost=1.0)
    cache.ask(3, 4, cost=3.0)  # the mean is 2 now: held for 1.5 s
    cache.tree.hold = Hold()
    cache.now = 1.2
    cache.ask(5, 6, 7, 8)
    cache.ask(9, 10)
    assert (cache.cached(1, 2), cache.cached(3, 4)) == (0, 2)
    cache.ask(11, 12)
    assert (cache.cached(3, 4), cache.cached(5, 6, 7, 8)) == (2, 2), "the dear one is older, but held"
    assert cache.tree.num_broken_holds == 0
    cache.now = 1.6
    cache.ask(13, 14)
    assert cache.cached(3, 4) == 0


def test_ttl_lets_go_by_itself_and_counts_from_the_last_use():
    cache = Cache(100, "ttl", ttl=10.0)
    cache.ask(*HOT)
    cache.ask(*RARE)
    cache.now = 6.0
    cache.ask(*HOT)
    cache.now = 9.9
    assert list(cache.tree.expire()) == []
    cache.now = 10.0
    assert len(cache.tree.expire()) == 4
    assert (cache.cached(*HOT), cache.cached(*RARE)) == (4, 0)
    node = cache.tree.acquire(cache.tree.match(key(*HOT)))
    cache.now = 100.0
    assert list(cache.tree.expire()) == [], "a live request uses it"
    cache.tree.unlock(node)
    assert len(cache.tree.expire()) == 4
    assert cache.tree.stats.evicted == {"room": 0, "quota": 0, "expired": 8, "flush": 0}


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
    assert stats.evicted == {"room": 1, "quota": 0, "expired": 0, "flush": 8}
    assert stats.reuse_gap_s.total == 5.0
    assert stats.idle_s.total == 4 * 40.0
    assert stats.lifetime_s.total == 4 * 45.0
    assert sum(stats.idle_s.counts) == 9
    assert stats.idle_s.counts[stats.idle_s.bounds.index(60.0)] == 4


@pytest.mark.parametrize("policy", ["lfu", "slru", "s3fifo", "gdsf"])
def test_what_is_used_often_survives_a_scan(policy):
    cache, plain = Cache(20, policy), Cache(20)
    for one in (cache, plain):
        for _ in range(6):
            one.ask(*HOT, cost=4.0)
            one.ask(300 + _, 400, cost=2.0)
        for i in range(40):
            one.ask(500 + i, 600 + i, cost=2.0)
    assert cache.cached(*HOT) == 4
    assert plain.cached(*HOT) == 0


def test_lfu_forgets():
    cache = Cache(8, "lfu")
    cache.tree.policy._half_life = 4.0
    for _ in range(8):
        cache.ask(*HOT)
    for _ in range(30):
        cache.ask(*RARE)
    for i in range(4):
        cache.ask(900 + i)
    assert cache.cached(*RARE) == 4
    assert cache.cached(*HOT) < 4


def test_gdsf_keeps_what_is_dear():
    cache = Cache(8, "gdsf")
    cache.ask(*HOT, cost=40.0)
    cache.ask(*RARE, cost=4.0)
    cache.ask(9, 9, cost=2.0)
    assert cache.cached(*HOT) == 4


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


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="lru"):
        make_policy("best", 10)
