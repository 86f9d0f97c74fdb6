"""A prompt's look-up as it is told: what was found, what left and why, and how the nearest prompt goes on."""

from array import array

import pytest

from radix import Namespace
from runtime.kv.misses import look_up
from runtime.protocol import Lookup
from tests.runtime.kv.test_cache import EVERYBODY, T, keep, key, make_cache


def told(cache, *tokens, namespace=EVERYBODY) -> Lookup:
    return look_up(cache, key(*tokens), namespace, len(tokens) - 1)


def other(lookup: Lookup) -> list[int]:
    return array("i", lookup.other).tolist()


@pytest.mark.parametrize(
    ("prompt", "found", "goes_on"),
    [
        ((1, 2, 3, 4, 5, 6, 7), 6, [7, 8]),
        ((1, 2, 3, 4, 5, 9, 9), 5, [6, 7, 8]),
        ((1, 2, 3, 9, 9), 3, [4, 5, 6, 7, 8]),
        ((1, 2, 9, 9), 2, [3, 4, 5, 6, 7, 8]),
        ((1, 9, 9), 1, [2, 3, 4, 5, 6, 7, 8]),
        ((9, 9, 9), 0, [1, 2, 3, 4, 5, 6, 7, 8]),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), 8, []),
    ],
)
def test_the_nearest_prompt_goes_on_where_the_match_ends(prompt, found, goes_on):
    cache = make_cache()
    keep(cache, 1, 2, 3, 4, 5, 6, 7, 8)
    lookup = told(cache, *prompt)
    assert (lookup.found, other(lookup), lookup.why) == (found, goes_on, None)


def test_of_several_prompts_the_latest_is_told():
    cache = make_cache(pages=200)
    now = 0.0
    cache.tree._clock = lambda: now
    for i in range(80):
        now += 1
        keep(cache, 1, 2, 100 + i, 3)
    keep(cache, 1, 2, 150, 3, 4, 4)
    assert other(told(cache, 1, 2, 9, 9)) == [179, 3]
    now += 1
    cache.tree.use(cache.tree.match(key(1, 2, 150, 3, 4, 4), EVERYBODY).node)
    assert other(told(cache, 1, 2, 9, 9)) == [150, 3, 4, 4]


def test_at_most_so_many_tokens_are_told():
    cache = make_cache(pages=64)
    keep(cache, *range(100))
    assert other(told(cache, 0, 1, 2, 99, 99)) == list(range(3, 35))
    keep(cache, *range(20), 77, 77)  # which cuts the run
    assert other(told(cache, 0, 1, 2, 99, 99)) == [*range(3, 20), 77, 77]


def test_no_other_namespace_is_looked_at():
    cache = make_cache()
    keep(cache, 1, 2, 3, 4, namespace=T)
    keep(cache, 1, 2, 3, 4, namespace=Namespace("t", "salt"))
    assert told(cache, 1, 2, 3, 4, 5) == Lookup(0, 4, 2)
    cache.flush()
    assert told(cache, 1, 2, 3, 4, 5) == Lookup(0, 4, 2)
    assert told(cache, 1, 2, 3, 4, 5, namespace=T).why == "flush"


def test_no_other_salt_is_previewed():
    cache = make_cache()
    keep(cache, 1, 2, 3, 4, namespace=Namespace("t", "salt"))
    assert other(told(cache, 9, 9, 9, namespace=Namespace("t", "other"))) == []
    assert other(told(cache, 9, 9, 9, namespace=Namespace("t", "salt"))) == [1, 2, 3, 4]


def test_what_left_and_when():
    cache = make_cache(pages=4, quotas={"t": 2})
    now = 9.0
    cache.tree._clock = lambda: now
    assert told(cache, 1, 2, 3).known_s == 0.0
    now = 10.0
    keep(cache, 1, 2, 3, 4, namespace=T)
    keep(cache, 5, 6, 7, 8, namespace=T)
    now = 12.5
    lookup = told(cache, 1, 2, 3, 4, 5, namespace=T)
    assert (lookup.found, lookup.why, lookup.gone_s, lookup.known_s) == (0, "quota", 2.5, 3.5)
    assert cache.pins.pin(array("i", [5, 6, 7, 8]), T, None, ttl_s=1.0) is not None
    now = 14.0
    cache.pins.expire()
    cache.allocator.release(cache.tree.evict(1))
    lookup = told(cache, 5, 6, 7, 8, 9, namespace=T)
    assert (lookup.found, lookup.why, lookup.gone_s, other(lookup)) == (2, "expired", 0.0, [])


@pytest.mark.parametrize("prompt", [(1,), (1, 2), (1, 2, 3)])
def test_a_prompt_may_end_within_a_page(prompt):
    cache = make_cache(page_size=4)
    keep(cache, 1, 2, 3, 4)
    assert cache.gone is None, "nobody has asked"
    assert told(cache, *prompt).found == len(prompt) - 1
    cache.flush()
    assert told(cache, *prompt) == Lookup(0, len(prompt) - 1, 4)


def test_nothing_is_looked_up_without_a_cache():
    cache = make_cache(prefix_cache=False)
    assert told(cache, 1, 2, 3) == Lookup(0, -1, 2)


def test_of_prompts_that_share_part_of_a_page_the_latest_is_told():
    cache = make_cache(pages=64)
    now = 0.0
    cache.tree._clock = lambda: now
    for last in (5, 6, 7):
        now += 1
        keep(cache, 1, 2, 3, last)
    assert other(told(cache, 1, 2, 3, 9, 9)) == [7]
    now += 1
    cache.tree.use(cache.tree.match(key(1, 2, 3, 5), EVERYBODY).node)
    assert other(told(cache, 1, 2, 3, 9, 9)) == [5]
