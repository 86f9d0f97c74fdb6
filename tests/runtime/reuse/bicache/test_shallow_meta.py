"""The promise of cached prefixes whose KV depends on more than the tokens before them."""

from __future__ import annotations

from array import array

from radix import RadixTree
from runtime.reuse.bicache.depth_table import DepthTable
from runtime.reuse.bicache.measured import ShallowMeta


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


ONE = DepthTable("one", {0: 0, 50: 2, 90: 3}, {50: (1.0, 0.9, 0.75), 90: (1.0, 0.95, 0.8)})


def test_a_split_leaves_the_record_with_both_parts():
    tree, meta = RadixTree(1), ShallowMeta(4, ONE)
    tree.insert(key(1, 2, 3, 4), array("i", [0, 1, 2, 3]), meta=meta)
    tree.insert(key(1, 2, 9), array("i", [0, 1, 9]), meta=ShallowMeta(3, ONE))
    found = sorted((len(node.pages), node.meta.encoded_tokens) for node in tree.nodes())
    assert found == [(1, 3), (2, 4), (2, 4)]
    tree.evict(1)
    kept = [node.meta for node in tree.nodes()]
    assert meta in kept, "an eviction takes pages from an end"


def test_operators_see_it():
    shown = ShallowMeta(48, ONE).describe()
    assert shown["encoded_tokens"] == 48
    assert shown["depth_table"] == ONE.version
    assert shown["depths"] == {"0": 0, "50": 2, "90": 3}
    assert shown["similarity"] == {"50": 0.9, "90": 0.8}, "of the last layer that is reused"
