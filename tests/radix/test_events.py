"""Events and hashes by hand; `test_tree.py` keeps a mirror from events alone."""

from array import array

import pytest

from radix import EventLog, Evictions, Namespace, Quotas, RadixTree, Removed, Stored, make_policy
from radix.events import Eviction
from radix.eviction import Outlook
from radix.hashes import block_hashes
from tests.radix.trees import key


def test_events_by_hand():
    """Stored, cut without an event, trimmed, extended behind the cut, and removed."""
    namespace, log = Namespace("t"), EventLog()
    tree = RadixTree(2, watchers=[log])
    tokens = key(1, 2, 3, 4, 5, 6)
    a, b, c = block_hashes(tokens, 8, None, namespace)
    tree.insert(tokens, array("i", [0, 1, 2]), namespace)
    assert log.take() == [Stored((a, b, c), None, tokens, namespace)]
    assert log.take() == []
    branch = key(7, 8)
    (d,) = block_hashes(branch, 8, a, namespace)
    tree.insert(tokens[:8] + branch, array("i", [0, 3]), namespace)
    assert log.take() == [Stored((d,), a, branch, namespace)]
    tree.evict(1)
    assert log.take() == [Removed((c,), namespace)]
    below = key(9, 9)
    (e,) = block_hashes(below, 8, b, namespace)
    tree.insert(tokens[:16] + below, array("i", [0, 1, 4]), namespace)
    assert log.take() == [Stored((e,), b, below, namespace)]
    tree.flush()
    removed = [event.hashes for event in log.take()]
    assert sorted(removed) == sorted([(a,), (b,), (d,), (e,)])


def test_blocks_are_whole_and_begin_with_their_namespace():
    tokens = key(1, 2, 3)
    assert len(block_hashes(tokens, 8, None, Namespace())) == 1
    assert len(block_hashes(tokens, 4, None, Namespace())) == 3
    assert len(block_hashes(tokens[:4], 8, None, Namespace())) == 0
    assert block_hashes(tokens, 12, 0, Namespace()) != block_hashes(tokens, 12, None, Namespace())
    roots = {block_hashes(tokens, 12, None, Namespace(*fields)) for fields in (("a",), ("", "a"), ("", "", "a"), ())}
    assert len(roots) == 4


HASHES = (9710604713292361974, 16292847435798180279, 1414168381119337323)


def test_hashes_are_those_of_every_other_engine():
    """Routers keep them, and compute them for prompts: a change of these numbers is one of the wire format."""
    tokens = key(*range(1, 7))
    assert Namespace("a", "ä", "k:1").to_bytes().hex() == "010000006102000000c3a4030000006b3a31"
    assert Namespace(salt="\ud800").to_bytes().hex() == "0000000003000000eda08000000000"
    assert block_hashes(tokens, 8, None, Namespace()) == HASHES
    assert block_hashes(tokens[8:], 8, HASHES[0], Namespace("ignored below the root")) == HASHES[1:]


def test_the_last_evictions_and_why():
    clock, policy, a = [0.0], make_policy("foresight", 9), Namespace("a")
    told = Evictions(policy, lambda: clock[0], most=3)
    tree = RadixTree(1, policy, lambda: clock[0], Quotas({"a": 9}), (told,))
    for i in range(4):
        tree.insert(key(i, 7), array("i", [2 * i, 2 * i + 1]), a)
    clock[0] = 8.0
    tree.evict(3)
    assert list(told.last) == [
        Eviction(8.0, 8.0, "room", 2, 0, a, Outlook("first turn", 3, pytest.approx(0.001 / 4.5, rel=1e-3))),
        Eviction(8.0, 8.0, "room", 1, 1, a, Outlook("first turn", 2, pytest.approx(0.001 / 3.5, rel=1e-3))),
    ]
    tree.make_room(a, 9)
    assert [(one.cause, one.pages) for one in told.last] == [("quota", 1), ("quota", 2), ("quota", 2)]
    tree.insert(key(5), array("i", [50]), a)
    tree.flush()
    assert len(told.last) == 3, "who is thrown out by hand needs no reason"
    policy = make_policy("lru", 9)
    told = Evictions(policy, lambda: clock[0])
    tree = RadixTree(1, policy, watchers=(told,))
    for i in range(60):
        tree.insert(key(i), array("i", [i]))
    tree.evict(60)
    assert (len(told.last), told.last[-1].outlook) == (50, None)
