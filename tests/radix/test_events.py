"""A mirror that is kept from events alone holds what the tree holds."""

import random
from array import array

import pytest

from radix import EventLog, Evictions, Namespace, Quotas, RadixTree, Removed, Stored, make_policy
from radix.events import Eviction
from radix.eviction import Outlook
from radix.hashes import block_hashes


class Mirror:
    """Blocks by hash, with their parents and tokens."""

    def __init__(self, block_bytes: int):
        self.block_bytes = block_bytes
        self.blocks: dict[int, tuple[int | None, bytes]] = {}

    def take(self, events) -> None:
        for event in events:
            if isinstance(event, Stored):
                parent = event.parent
                assert parent is None or parent in self.blocks, "a child came before its parent"
                for i, value in enumerate(event.hashes):
                    assert value not in self.blocks, "stored twice"
                    self.blocks[value] = (parent, event.tokens[i * self.block_bytes : (i + 1) * self.block_bytes])
                    parent = value
            else:
                for value in event.hashes:
                    del self.blocks[value]


def blocks_of(tree: RadixTree, block_bytes: int) -> dict[int, tuple[int | None, bytes]]:
    """Parent and tokens of each of the tree's blocks, by its hash, from a walk."""
    found, last = {}, {}
    for node in tree.nodes():
        parent = last.get(id(node.parent))
        for i, value in enumerate(block_hashes(node.key, block_bytes, parent, node.namespace)):
            found[value] = (parent, node.key[i * block_bytes : (i + 1) * block_bytes])
            parent = value
        last[id(node)] = parent
    return found


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_mirror_after_ten_thousand_random_operations(page_size):
    draw = random.Random(page_size)
    log = EventLog()
    tree = RadixTree(page_size, make_policy("lru", 400), watchers=[log])
    mirror, locked, next_page = Mirror(4 * page_size), [], 0
    for step in range(10_000):
        tokens = array("i", [draw.randrange(3) for _ in range(draw.randrange(1, 12 * page_size))])
        namespace = draw.choice([Namespace(), Namespace(), Namespace("tenant")])
        kind = draw.random()
        if kind < 0.6:
            count = len(tokens) // page_size
            tree.insert(tokens.tobytes(), array("i", range(next_page, next_page + count)), namespace)
            next_page += count
        elif kind < 0.7:
            locked.append(tree.lock_match(tree.match(tokens.tobytes(), namespace)))
        elif kind < 0.8 and locked:
            tree.unlock(locked.pop(draw.randrange(len(locked))))
        elif kind < 0.999:
            tree.evict(draw.randrange(1, 10))
        else:
            tree.flush()
        mirror.take(log.take())
        if step % 500 == 0:
            assert mirror.blocks == blocks_of(tree, 4 * page_size)
    assert mirror.blocks == blocks_of(tree, 4 * page_size)
    assert len(mirror.blocks) > 50


def test_events_by_hand():
    """Stored, cut without an event, trimmed, extended behind the cut, and removed."""
    namespace, log = Namespace("t"), EventLog()
    tree = RadixTree(2, watchers=[log])
    tokens = array("i", [1, 2, 3, 4, 5, 6]).tobytes()
    a, b, c = block_hashes(tokens, 8, None, namespace)
    tree.insert(tokens, array("i", [0, 1, 2]), namespace)
    assert log.take() == [Stored((a, b, c), None, tokens, namespace)]
    assert log.take() == []
    branch = array("i", [7, 8]).tobytes()
    (d,) = block_hashes(branch, 8, a, namespace)
    tree.insert(tokens[:8] + branch, array("i", [0, 3]), namespace)
    assert log.take() == [Stored((d,), a, branch, namespace)]
    tree.evict(1)
    assert log.take() == [Removed((c,), namespace)]
    below = array("i", [9, 9]).tobytes()
    (e,) = block_hashes(below, 8, b, namespace)
    tree.insert(tokens[:16] + below, array("i", [0, 1, 4]), namespace)
    assert log.take() == [Stored((e,), b, below, namespace)]
    tree.flush()
    removed = [event.hashes for event in log.take()]
    assert sorted(removed) == sorted([(a,), (b,), (d,), (e,)])


def test_blocks_are_whole_and_begin_with_their_namespace():
    tokens = array("i", [1, 2, 3]).tobytes()
    assert len(block_hashes(tokens, 8, None, Namespace())) == 1
    assert len(block_hashes(tokens, 4, None, Namespace())) == 3
    assert len(block_hashes(tokens[:4], 8, None, Namespace())) == 0
    assert block_hashes(tokens, 12, 0, Namespace()) != block_hashes(tokens, 12, None, Namespace())
    roots = {block_hashes(tokens, 12, None, Namespace(*fields)) for fields in (("a",), ("", "a"), ("", "", "a"), ())}
    assert len(roots) == 4


HASHES = (9710604713292361974, 16292847435798180279, 1414168381119337323)


def test_hashes_are_those_of_every_other_engine():
    """Routers keep them, and compute them for prompts: a change of these numbers is one of the wire format."""
    tokens = array("i", range(1, 7)).tobytes()
    assert Namespace("a", "ä", "k:1").to_bytes().hex() == "010000006102000000c3a4030000006b3a31"
    assert Namespace(salt="\ud800").to_bytes().hex() == "0000000003000000eda08000000000"
    assert block_hashes(tokens, 8, None, Namespace()) == HASHES
    assert block_hashes(tokens[8:], 8, HASHES[0], Namespace("ignored below the root")) == HASHES[1:]


def test_the_last_evictions_and_why():
    def key(*tokens: int) -> bytes:
        return array("i", tokens).tobytes()

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
