"""Attached runs: found behind their tokens alone, evicted as a whole and before their prefix, never shown as text."""

from array import array

import pytest

from radix import EventLog, Match, Namespace, RadixTree, attached_key, make_policy, nearest, text_of_path
from radix.inspection import slices, view
from runtime.features.drafts.lookup import continuation
from tests.radix.trees import key

SIZE = 4


class Trees:
    """A tree with pages numbered in order."""

    def __init__(self, policy: str = "lru"):
        self.log = EventLog()
        self.tree = RadixTree(SIZE, make_policy(policy, 100), watchers=[self.log])
        self.next = 0

    def add(self, path: bytes):
        has = self.tree.match(path).pages
        fresh = array("i", range(self.next, self.next + len(path) // SIZE // 4 - len(has)))
        self.next += len(fresh)
        node, _ = self.tree.insert(path, has + fresh)
        self.tree.check()
        return node

    def attach(self, *tokens: int, pages: int = 2):
        whole = len(tokens) // SIZE * SIZE
        return self.add(key(*tokens[:whole]) + attached_key(key(*tokens[whole:]), pages, SIZE * 4))

    def nearest(self, *tokens: int):
        match = self.tree.match(key(*tokens))
        return nearest(key(*tokens), match, self.tree.root(Namespace()), SIZE)


@pytest.fixture(params=["lru", "foresight"])
def trees(request):
    return Trees(request.param)


def test_the_nearest_run_on_the_path_is_found_to_the_token(trees):
    trees.add(key(*range(1, 13)))
    runs = {length: trees.attach(*range(1, length + 1)) for length in (3, 4, 6, 11)}
    assert {length: len(run.pages) for length, run in runs.items()} == {3: 3, 4: 2, 6: 3, 11: 3}
    for length in range(14):
        longest = max((one for one in runs if one <= length), default=0)
        found = trees.nearest(*range(1, length + 1))
        assert found == (runs.get(longest), longest)
    assert trees.nearest(1, 2, 3, 4, 5, 99, 98) == (runs[4], 4)
    assert trees.nearest(99, 98) == (None, 0)
    assert nearest(key(1, 2, 3), Match(), trees.tree.root(Namespace("a")), SIZE) == (None, 0)


def test_it_goes_as_a_whole_and_before_its_prefix(trees):
    trees.add(key(*range(1, 9)))
    run = trees.attach(*range(1, 7))
    assert len(trees.tree.evict(1)) in (1, 3)
    while trees.tree.num_pages:
        assert len(run.pages) in (0, 3) or run.parent is None
        above = run.parent
        freed = trees.tree.evict(1)
        assert freed
        assert (run.parent is above) or len(freed) == 3
        trees.tree.check()
    assert trees.tree.num_nodes == 0


def test_a_spare_run_goes_first_unless_it_is_used_or_locked(trees):
    old = trees.add(key(*range(50, 58)))
    trees.add(key(*range(1, 13)))
    first, second, third = (trees.attach(*range(1, length + 1)) for length in (4, 8, 12))
    for run in (second, first, third):
        trees.tree.spares.add(run)
    trees.tree.use(second)
    trees.tree.lock(third)
    assert trees.tree.evict(1) == first.pages
    assert old.parent is not None
    trees.tree.evict(1)
    assert second.parent is not None
    assert third.parent is not None
    trees.tree.unlock(third)


def test_it_is_no_text_and_no_event(trees):
    trees.add(key(1, 2, 3, 4))
    run = trees.attach(1, 2, 3, 4, 5, 6)
    (stored,) = trees.log.take()
    assert stored.tokens == key(1, 2, 3, 4)
    assert text_of_path(run) == key(1, 2, 3, 4, 5, 6)
    assert [node.preview for node in view(trees.tree, preview_tokens=9)] == [key(1, 2, 3, 4), b""]
    assert [node.key for some in slices(trees.tree) for node, _ in some] == [key(1, 2, 3, 4)]
    assert continuation(trees.tree, key(1, 2, 3), Namespace(), 9).tolist() == [4]
    trees.add(key(*range(1, 9)))
    assert continuation(trees.tree, key(1, 2, 3, 4, 5), Namespace(), 9).tolist() == [6, 7, 8]
    trees.log.take()
    trees.tree.drop(run)
    assert trees.log.take() == []


def test_a_path_and_its_run_can_come_together():
    """As a tier loads them."""
    trees = Trees()
    run = trees.attach(*range(1, 11))
    assert run.is_attached
    assert not run.parent.is_attached
    assert (run.parent.num_attached, len(run.pages), len(run.parent.pages)) == (1, 3, 2)
    assert trees.attach(*range(1, 11)) is run
