"""The memory of what left a tree, beside a plain one that asks the tree alone."""

import random
from array import array

import pytest

from radix import Gone, Namespace, Quotas, RadixTree, hashes
from radix.gone import Left

SPACES = (Namespace("a"), Namespace("a", "salt"), Namespace("b"))


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Life:
    """A tree of pages of two tokens, its memory, and for every prompt ever inserted the latest end of each page."""

    def __init__(self, seed: int, places: int = 1 << 20):
        self.now = 0.0
        self.draw = random.Random(seed)
        self.gone = Gone(8, lambda: self.now, places)
        self.tree = RadixTree(2, clock=lambda: self.now, quotas=Quotas({"b": 12}), watchers=(self.gone,))
        self.prompts: dict[tuple[Namespace, bytes], None] = {}
        self.ends: dict[tuple[Namespace, bytes], Left] = {}
        self.page = 0

    def there(self) -> dict[tuple[Namespace, bytes], int]:
        return {(space, prompt): len(self.tree.match(prompt, space).pages) for space, prompt in self.prompts}

    def insert(self) -> None:
        space = self.draw.choice(SPACES)
        prompt = key(*(self.draw.randrange(2) for _ in range(2 * self.draw.randrange(1, 9))))
        self.prompts[space, prompt] = None
        self.page += 100
        self.tree.insert(prompt, array("i", range(self.page, self.page + len(prompt) // 8)), space)

    def remove(self) -> None:
        before, cause = self.there(), self.draw.choice(("room", "room", "room", "quota", "flush", "drop"))
        if cause == "room":
            self.tree.evict(self.draw.randrange(1, 6))
        elif cause == "quota":
            self.tree.make_room(Namespace("b"), self.draw.randrange(6))
        elif cause == "flush" and self.draw.random() < 0.2:
            self.tree.flush()
        elif cause == "drop" and (nodes := list(self.tree.nodes())):
            self.tree.drop(self.draw.choice(nodes))
        why = "flush" if cause == "drop" else cause
        for (space, prompt), pages in self.there().items():
            for page in range(pages, before[space, prompt]):
                self.ends[space, prompt[: 8 * (page + 1)]] = Left(self.now, why)

    def check(self) -> None:
        for (space, prompt), pages in self.there().items():
            if pages < len(prompt) // 8:
                expected = self.ends.get((space, prompt[: 8 * (pages + 1)]))
                assert self.gone.find(prompt, pages, space) == expected, (space, prompt, pages)


@pytest.mark.parametrize("seed", range(12))
def test_the_first_missing_page_is_found_with_its_time_and_cause(seed):
    life = Life(seed)
    for _ in range(120):
        life.now += 1.0
        life.insert() if life.draw.random() < 0.6 else life.remove()
        life.check()
    assert {left.why for left in life.ends.values()} == {"room", "quota", "flush"}


def test_a_page_that_was_never_there_is_unknown():
    life = Life(0)
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
    life = Life(0, places=8)
    for i in range(100):
        life.now += 1
        life.tree.insert(key(i, i), array("i", [i]), SPACES[0])
        life.tree.evict(1)
        assert life.gone.find(key(i, i), 0, SPACES[0]) == Left(i + 1.0, "room")
    known = [left for n in range(100) if (left := life.gone.find(key(n, n), 0, SPACES[0]))]
    assert 1 <= len(known) <= 8


def test_a_run_that_leaves_page_by_page_is_hashed_once(monkeypatch):
    life, hashed = Life(0), []
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
    life = Life(0)
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
    life, run = Life(0), key(1, 2, 3, 4, 5, 6)
    node, _ = life.tree.insert(run, array("i", [0, 1, 2]), SPACES[0])
    life.tree.pin(node)
    life.now = 5.0
    life.tree.unpin(node, expired=True)
    life.tree.unlock(life.tree.lock_match(life.tree.match(run[:8], SPACES[0])))
    life.tree.evict(9)
    assert [life.gone.find(run, page, SPACES[0]) for page in range(3)] == [Left(5.0, "expired")] * 3


def test_a_pin_below_another_one_expires_alone():
    life = Life(0)
    node, _ = life.tree.insert(key(1, 2, 3, 4), array("i", [0, 1]), SPACES[0])
    life.tree.insert(key(1, 2, 5, 6), array("i", [0, 9]), SPACES[0])
    life.tree.pin(node)
    life.tree.pin(node.parent)
    life.tree.unpin(node, expired=True)
    assert (node.expired_s, node.parent.expired_s) == (0.0, -1.0)
    life.tree.flush()
    assert life.gone.find(key(1, 2, 3, 4), 1, SPACES[0]) == Left(0.0, "flush"), "no room was needed"
