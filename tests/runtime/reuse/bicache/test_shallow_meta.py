"""The promise of cached prefixes whose KV depends on more than the tokens before them."""

from __future__ import annotations

from array import array

from radix import RadixTree
from runtime.reuse.bicache.shallow_meta import ShallowMeta, meet_all


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def test_the_weaker_of_two_is_promised():
    long, short = ShallowMeta(100, "v1", (1.0, 0.9, 0.7)), ShallowMeta(60, "v1", (1.0, 0.8, 0.75))
    assert long.meet(short) == short.meet(long) == ShallowMeta(60, "v1", (1.0, 0.8, 0.7))
    assert long.meet(long) == long
    assert long.meet(ShallowMeta(60, "v1")) == ShallowMeta(60, "v1")
    assert long.meet(ShallowMeta(100, "v2")) is None


def test_a_split_leaves_the_record_with_both_parts():
    tree, meta = RadixTree(1), ShallowMeta(4, "v1")
    tree.insert(key(1, 2, 3, 4), array("i", [0, 1, 2, 3]), meta=meta)
    tree.insert(key(1, 2, 9), array("i", [0, 1, 9]), meta=ShallowMeta(3, "v1"))
    found = sorted((len(node.pages), node.meta.encoded_tokens) for node in tree.nodes())
    assert found == [(1, 3), (2, 4), (2, 4)]
    assert meet_all(tree.match(key(1, 2, 3, 4)).node) == meta
    assert meet_all(tree.match(key(1, 2)).node) == meta, "they were encoded for four tokens, whatever is matched"
    assert meet_all(tree.match(key(1, 2, 9)).node) == ShallowMeta(3, "v1"), "as much as the shorter encoding saw"


def test_nothing_is_promised_where_a_part_has_no_record_or_another_profile():
    tree = RadixTree(1)
    tree.insert(key(1, 2), array("i", [0, 1]))
    tree.insert(key(1, 2, 3), array("i", [0, 1, 2]), meta=ShallowMeta(3, "v1"))
    assert meet_all(tree.match(key(1, 2, 3)).node) is None
    assert meet_all(tree.match(key(7)).node) is None
    tree.insert(key(5), array("i", [5]), meta=ShallowMeta(1, "v1"))
    tree.insert(key(5, 6), array("i", [5, 6]), meta=ShallowMeta(2, "v2"))
    assert meet_all(tree.match(key(5, 6)).node) is None
    assert meet_all(tree.match(key(5)).node) == ShallowMeta(1, "v1")


def test_operators_see_it():
    assert ShallowMeta(48, "v1").describe() == {"encoded_tokens": 48, "depth_table": "v1", "similarity_known": False}
    assert ShallowMeta(48, "v1", (1.0,)).describe()["similarity_known"] is True
