"""The promise of cached prefixes whose KV depends on more than the tokens before them."""

from __future__ import annotations

from array import array

from radix import RadixTree
from runtime.reuse.bicache.depth_table import DepthTable
from runtime.reuse.bicache.shallow_meta import ShallowMeta, meet_all


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


ONE = DepthTable("one", {0: 0, 50: 2, 90: 3}, {50: (1.0, 0.9, 0.75), 90: (1.0, 0.95, 0.8)}, {60: {50: 1}})
TWO = DepthTable("two", {0: 1})


def test_the_shorter_encoding_counts_and_tables_do_not_mix():
    long, short = ShallowMeta(100, ONE), ShallowMeta(60, ONE)
    assert long.meet(short) == short.meet(long) == short
    assert long.meet(long) == long
    assert long.meet(ShallowMeta(100, TWO)) is None


def test_a_reader_learns_the_depth_by_its_own_share():
    meta = ShallowMeta(100, ONE)
    assert [meta.depth(100, ratio) for ratio in (0.4, 0.5, 0.89, 0.9, 1.0)] == [0, 2, 2, 3, 3]
    assert [meta.depth(60, ratio) for ratio in (0.4, 0.5, 1.0)] == [0, 1, 1], "the beginning of a longer encoding"
    assert meta.depth(59, 1.0) == 0, "not measured"


def test_a_split_leaves_the_record_with_both_parts():
    tree, meta = RadixTree(1), ShallowMeta(4, ONE)
    tree.insert(key(1, 2, 3, 4), array("i", [0, 1, 2, 3]), meta=meta)
    tree.insert(key(1, 2, 9), array("i", [0, 1, 9]), meta=ShallowMeta(3, ONE))
    found = sorted((len(node.pages), node.meta.encoded_tokens) for node in tree.nodes())
    assert found == [(1, 3), (2, 4), (2, 4)]
    assert meet_all(tree.match(key(1, 2, 3, 4)).node) == meta
    assert meet_all(tree.match(key(1, 2)).node) == meta, "they were encoded for four tokens, whatever is matched"
    assert meet_all(tree.match(key(1, 2, 9)).node) == ShallowMeta(3, ONE), "as much as the shorter encoding saw"


def test_nothing_is_promised_where_a_part_has_no_record_or_another_profile():
    tree = RadixTree(1)
    tree.insert(key(1, 2), array("i", [0, 1]))
    tree.insert(key(1, 2, 3), array("i", [0, 1, 2]), meta=ShallowMeta(3, ONE))
    assert meet_all(tree.match(key(1, 2, 3)).node) is None
    assert meet_all(tree.match(key(7)).node) is None
    tree.insert(key(5), array("i", [5]), meta=ShallowMeta(1, ONE))
    tree.insert(key(5, 6), array("i", [5, 6]), meta=ShallowMeta(2, TWO))
    assert meet_all(tree.match(key(5, 6)).node) is None
    assert meet_all(tree.match(key(5)).node) == ShallowMeta(1, ONE)


def test_operators_see_it():
    shown = ShallowMeta(48, ONE).describe()
    assert shown["encoded_tokens"] == 48
    assert shown["depth_table"] == ONE.version
    assert shown["depths"] == {"0": 0, "50": 2, "90": 3}
    assert shown["similarity"] == {"50": 0.9, "90": 0.8}, "of the last layer that is reused"
