"""The index of blocks by replica, and the choice by prefix and load."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.ray.prefixes import BoundedPrefix, PrefixIndex


def test_leading_blocks_count_and_gaps_end_a_match():
    index = PrefixIndex[str]()
    index.stored("a", [1, 2, 3])
    index.stored("b", [1, 3])
    assert index.match([1, 2, 3, 4]) == {"a": 3, "b": 1}
    assert index.match([2, 3]) == {"a": 2}
    assert index.match([]) == index.match([9]) == {}
    index.removed("a", [2, 7])
    assert index.match([1, 2, 3]) == {"a": 1, "b": 1}
    index.forget("b")
    assert (index.match([1]), index.held("a"), index.held("b")) == ({"a": 1}, {1, 3}, set())
    index.forget("a")
    assert not index._holders, "nothing is kept of what nobody holds"


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=4)), max_size=30))
def test_the_index_is_a_set_of_blocks_for_each_replica(changes):
    index, held = PrefixIndex[str](), {"a": set(), "b": set()}
    for stores, replica, blocks in changes:
        (index.stored if stores else index.removed)(replica, blocks)
        held[replica] = held[replica] | set(blocks) if stores else held[replica] - set(blocks)
    prompt = list(range(10))
    expected = {r: next((n for n in prompt if n not in blocks), 10) for r, blocks in held.items()}
    assert index.match(prompt) == {replica: n for replica, n in expected.items() if n}


LOADS = {"a": 0.0, "b": 0.0, "c": 0.0}


def test_the_longest_prefix_wins_while_load_allows():
    policy = BoundedPrefix(weight=1, share=1.5, slack=100, chooser=random.Random(0))
    matches = {"a": 100, "b": 400}
    assert policy.rank(matches, LOADS)[:2] == ["b", "a"]
    assert policy.rank(matches, {**LOADS, "b": 90})[0] == "b", "310 tokens are saved there"
    assert policy.rank(matches, {"a": 1000, "b": 1290, "c": 1000})[0] == "b"
    assert policy.rank(matches, {"a": 1000, "b": 1310, "c": 1000})[0] == "a", "sooner there"
    heavy = BoundedPrefix(weight=1e9, share=1.5, slack=100, chooser=random.Random(0))
    assert heavy.rank(matches, {"a": 1000, "b": 5000, "c": 1000})[0] == "a", "no prefix outweighs the bound"


def test_without_a_prefix_the_lighter_of_two():
    policy = BoundedPrefix(chooser=random.Random(0))
    first = Counter(policy.rank({}, {"a": 0.0, "b": 5.0, "c": 9.0})[0] for _ in range(600))
    assert first["c"] == 0, "never the heaviest"
    assert 300 < first["a"] < 500, "in two of three pairs"
    assert policy.rank({}, {"a": 3.0}) == ["a"]
    assert policy.rank({"a": 5}, {}) == []


def test_nobody_is_asked_twice():
    policy = BoundedPrefix(chooser=random.Random(0))
    for _ in range(50):
        ranked = policy.rank({"a": 5}, {"a": 1e6, "b": 0.0, "c": 1.0})
        assert len(ranked) == len(set(ranked))
        assert ranked[0] in ("b", "c")
