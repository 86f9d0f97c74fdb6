"""The memory of what left a tree, by hand; `test_tree.py` compares it with a plain one."""

from array import array

import pytest

from radix import Gone, Namespace, RadixTree, hashes
from radix.gone import Left
from tests.radix.trees import key

SPACES = (Namespace("a"), Namespace("a", "salt"), Namespace("b"))


class Life:
    """A tree of pages of two tokens, and the memory of what left it."""

    def __init__(self, places: int = 1 << 20):
        self.now = 0.0
        self.gone = Gone(8, lambda: self.now, places)
        self.tree = RadixTree(2, clock=lambda: self.now, watchers=(self.gone,))


def test_a_page_that_was_never_there_is_unknown():
    life = Life()
    life.tree.insert(key(1, 2, 3, 4), array("i", [0, 1]), SPACES[0])
    life.tree.flush()
    assert life.gone.find(key(1, 2, 3, 4), 0, SPACES[0]) == Left(0.0, "flush")
    for prompt, page, space in (
        (key(1, 2, 3, 4), 0, SPACES[1]),
        (key(1, 2, 3, 4), 0, SPACES[2]),
        (key(1, 3, 3, 4), 0, SPACES[0]),
        (key(1, 2, 3, 5), 1, SPACES[0]),
        (key(1, 2, 3), 1, SPACES[0]),
        (key(1), 0, SPACES[0]),
        (key(), 0, SPACES[0]),
    ):
        assert life.gone.find(prompt, page, space) is None


def test_the_memory_is_bounded_and_the_latest_takes_the_place():
    life = Life(places=8)
    for i in range(100):
        life.now += 1
        life.tree.insert(key(i, i), array("i", [i]), SPACES[0])
        life.tree.evict(1)
        assert life.gone.find(key(i, i), 0, SPACES[0]) == Left(i + 1.0, "room")
    known = [left for n in range(100) if (left := life.gone.find(key(n, n), 0, SPACES[0]))]
    assert 1 <= len(known) <= 8


def test_a_run_that_leaves_page_by_page_is_hashed_once(monkeypatch):
    life, hashed = Life(), []
    real = hashes.xxh64_intdigest
    monkeypatch.setattr(hashes, "xxh64_intdigest", lambda *args: hashed.append(args) or real(*args))
    life.tree.insert(key(*range(64)), array("i", range(32)), SPACES[0])
    for _ in range(20):
        life.tree.evict(1)
    life.tree.match(key(*range(9)), SPACES[0])
    life.tree.insert(key(0, 1, 2, 3, 9, 9), array("i", [0, 1, 99]), SPACES[0])  # cut
    while life.tree.evict(1):
        pass
    assert len(hashed) == 1 + 32 + 1, "the namespace, the run, the page beside it"
    assert all(life.gone.find(key(*range(64)), page, SPACES[0]) for page in range(32))


@pytest.mark.parametrize(("used", "why"), [(False, "expired"), (True, "room")])
def test_what_a_pin_kept_until_its_time_was_over_has_expired_unless_it_was_used(used, why):
    life = Life()
    node, _ = life.tree.insert(key(1, 2, 3, 4, 5, 6), array("i", [0, 1, 2]), SPACES[0])
    life.tree.pin(node)
    life.now = 5.0
    life.tree.unpin(node, expired=True)
    life.now = 6.0
    life.tree.insert(key(1, 2, 9, 9), array("i", [0, 7]), SPACES[0])
    if used:
        life.tree.use(life.tree.match(key(1, 2, 3, 4, 5, 6), SPACES[0]).node)
    life.now = 7.0
    life.tree.evict(1) if used else life.tree.drop(life.tree.match(key(1, 2, 9, 9), SPACES[0]).node)
    life.tree.evict(1)
    assert life.gone.find(key(1, 2, 3, 4, 5, 6), 2, SPACES[0]) == Left(7.0, why)
    life.tree.evict(9)
    assert life.gone.find(key(1, 2, 3, 4), 1, SPACES[0]) == Left(7.0, why)


def test_a_run_that_is_cut_after_its_pin_has_expired_has_expired_as_a_whole():
    life, run = Life(), key(1, 2, 3, 4, 5, 6)
    node, _ = life.tree.insert(run, array("i", [0, 1, 2]), SPACES[0])
    life.tree.pin(node)
    life.now = 5.0
    life.tree.unpin(node, expired=True)
    life.tree.unlock(life.tree.lock_match(life.tree.match(run[:8], SPACES[0])))
    life.tree.evict(9)
    assert [life.gone.find(run, page, SPACES[0]) for page in range(3)] == [Left(5.0, "expired")] * 3


def test_a_pin_below_another_one_expires_alone():
    life = Life()
    node, _ = life.tree.insert(key(1, 2, 3, 4), array("i", [0, 1]), SPACES[0])
    life.tree.insert(key(1, 2, 5, 6), array("i", [0, 9]), SPACES[0])
    life.tree.pin(node)
    life.tree.pin(node.parent)
    life.tree.unpin(node, expired=True)
    assert (node.expired_s, node.parent.expired_s) == (0.0, -1.0)
    life.tree.flush()
    assert life.gone.find(key(1, 2, 3, 4), 1, SPACES[0]) == Left(0.0, "flush"), "no room was needed"
