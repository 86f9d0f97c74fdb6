"""What is promised of cached prefixes whose KV depends on more than what stands before."""

from __future__ import annotations

from array import array

from radix import RadixTree, ShallowMeta


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
    tree.insert(key(1, 2, 3, 4), array("i", [0, 1, 2, 3]), shallow=meta)
    tree.insert(key(1, 2, 9), array("i", [0, 1, 9]), shallow=ShallowMeta(3, "v1"))
    found = sorted((len(node.pages), node.shallow.encoded_tokens) for node in tree.nodes())
    assert found == [(1, 3), (2, 4), (2, 4)]
    assert tree.shallow(tree.match(key(1, 2, 3, 4))) == meta
    assert tree.shallow(tree.match(key(1, 2))) == meta, "they were encoded for four tokens, whatever is matched"
    assert tree.shallow(tree.match(key(1, 2, 9))) == ShallowMeta(3, "v1"), "as much as the shorter encoding saw"


def test_nothing_is_promised_where_a_part_has_no_record_or_another_profile():
    tree = RadixTree(1)
    tree.insert(key(1, 2), array("i", [0, 1]))
    tree.insert(key(1, 2, 3), array("i", [0, 1, 2]), shallow=ShallowMeta(3, "v1"))
    assert tree.shallow(tree.match(key(1, 2, 3))) is None
    assert tree.shallow(tree.match(key(7))) is None
    tree.insert(key(5), array("i", [5]), shallow=ShallowMeta(1, "v1"))
    tree.insert(key(5, 6), array("i", [5, 6]), shallow=ShallowMeta(2, "v2"))
    assert tree.shallow(tree.match(key(5, 6))) is None
    assert tree.shallow(tree.match(key(5))) == ShallowMeta(1, "v1")
