"""Namespaces: different ones share nothing, and never hash alike."""

import random
from array import array

import msgspec

from radix import Namespace
from radix.hashes import block_hashes

# Separators of every form that a namespace had or might have.
PARTS = ["", "a", "/", "#", ":", "\0", "\1\0\0\0", "a/b", "#bicache:1", "\x04\x00\x00\x00", "ä", "\ud800"]


def random_namespaces(count: int) -> set[Namespace]:
    draw = random.Random(3)
    return {Namespace(*("".join(draw.choices(PARTS, k=draw.randrange(3))) for _ in range(4))) for _ in range(count)}


def test_different_namespaces_never_hash_alike():
    namespaces, tokens = random_namespaces(20_000), array("i", [1]).tobytes()
    assert len(namespaces) > 10_000
    assert len({namespace.to_bytes() for namespace in namespaces}) == len(namespaces)
    assert len({block_hashes(tokens, 4, None, namespace) for namespace in namespaces}) == len(namespaces)


def test_owners():
    assert Namespace("t", "s").for_entry("bicache", "1").owner == Namespace("t", "other").owner == Namespace("t")
    assert Namespace("", "s", "bicache:1").owner == Namespace("", "s")
    assert Namespace().for_entry("bicache", "1").owner == Namespace().owner == Namespace()


def test_the_namespace_of_an_entry_s_readers():
    entry = Namespace("t", "s").for_entry("bicache", "1")
    assert entry == Namespace("t", "s", "bicache:1")
    assert entry.without_entry == Namespace("t", "s") == Namespace("t", "s").without_entry
    adapted = Namespace("t", "s", adapter="ab")
    assert adapted.for_entry("module", "1") == Namespace("t", "s", "module:1", "ab")
    assert adapted.for_entry("module", "1").without_entry == adapted, "entries are the adapter's own"
    assert adapted.owner == Namespace("t")


def test_namespaces_travel():
    for namespace in (Namespace(), Namespace("t", "s#", "bicache:1"), Namespace(adapter="ab")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(namespace), type=Namespace) == namespace
