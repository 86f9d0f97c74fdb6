"""The board of pins on a tree without an engine: budget, times to live, and which pin yields."""

from __future__ import annotations

from array import array

import pytest

from radix import Namespace, RadixTree
from runtime.kv.pins import PinBoard

T = Namespace("t")
EVERYBODY = Namespace()


class Board:
    """A board over a tree with pages of two tokens."""

    def __init__(self, budget: int = 6):
        self.now = 100.0
        self.tree = RadixTree(2)
        self.pins = PinBoard(self.tree, budget, lambda: self.now)
        self.pages = 0

    def keep(self, *tokens: int, namespace: Namespace = EVERYBODY) -> None:
        pages = array("i", range(self.pages, self.pages + len(tokens) // 2))
        self.pages += len(pages)
        self.tree.insert(array("i", tokens).tobytes(), pages, namespace)

    def pin(self, *tokens: int, namespace: Namespace = EVERYBODY, name: str | None = None, ttl_s: float | None = None):
        return self.pins.pin(array("i", tokens), namespace, name, ttl_s)

    @property
    def names(self) -> list[str | None]:
        return [pin.name for pin in self.pins.pins.values()]


@pytest.fixture
def board() -> Board:
    """Three prefixes of four tokens, the first two of which are shared by two."""
    board = Board()
    for tokens in ((1, 1, 2, 2), (1, 1, 3, 3), (5, 5, 6, 6)):
        board.keep(*tokens)
    return board


def test_a_pin_is_described(board):
    made = board.pin(1, 1, 2, 2, name="one", ttl_s=5.0)
    (pin,) = board.pins.pins.values()
    assert made == {"pin": {"id": pin.id, "name": "one", "tenant": "", "tokens": 4, "hits": 0, "expires_in_s": 5.0}}
    board.now += 3.5
    assert board.pins.describe(pin)["expires_in_s"] == 1.5
    board.now += 3.5
    assert board.pins.describe(pin)["expires_in_s"] == 0.0
    board.tree.use(pin.node)
    assert board.pins.describe(pin)["hits"] == 1
    other = board.pin(5, 5)["pin"]
    assert other == {"id": other["id"], "name": None, "tenant": "", "tokens": 2, "hits": 0, "expires_in_s": None}


def test_no_pin_is_called_like_one_of_another_engine():
    boards = [Board() for _ in range(2)]
    for board in boards:
        board.keep(1, 1)
    ids = [board.pin(1, 1)["pin"]["id"] for board in boards for _ in range(3)]
    assert len(set(ids)) == 6
    assert {len(one) for one in ids} == {len("pin-0123456789abcdef")}
    assert not boards[1].pins.unpin(ids[0])


def test_whole_pages_are_pinned_and_shared_ones_counted_once(board):
    board.pin(1, 1, 2, 2, 9)
    board.pin(1, 1, 3, 3)
    board.pin(5, 5, 6)
    assert board.tree.num_pinned_pages == board.tree.num_locked_pages == 4
    assert sorted(board.tree.flush()) == [5]
    board.pins.unpin_all()
    assert (board.tree.num_pinned_pages, board.tree.num_locked_pages, board.pins.pins) == (0, 0, {})


def test_a_prefix_shorter_than_a_page_is_refused(board):
    assert "shorter than a page of 2 tokens" in board.pin(1)["refused"]
    assert "pin" in board.pin(1, 1)
    assert board.pins.num_refused == 1


def test_missing_pages_have_to_be_computed_first(board):
    assert board.pin(1, 1, 2, 2, 8, 8, 9, 9) == {"missing_tokens": 4}
    assert board.pin(1, 1, namespace=T) == {"missing_tokens": 2}
    assert (board.pins.pins, board.pins.num_refused, board.tree.num_locked_pages) == ({}, 0, 0)


def test_the_budget_counts_distinct_pages_and_those_to_come():
    board = Board(budget=4)
    for tokens in ((1, 1, 2, 2), (1, 1, 3, 3), (5, 5, 6, 6)):
        board.keep(*tokens)
    assert board.pin(*range(8)) == {"missing_tokens": 8}, "all of the budget"
    assert "would hold 5 pages" in board.pin(*range(10))["refused"]
    board.pin(1, 1, 2, 2)
    board.pin(1, 1, 3, 3)
    assert board.tree.num_pinned_pages == 3
    refused = board.pin(5, 5, 6, 6)["refused"]
    assert "would hold 5 pages of 2 tokens; the budget is 4 pages, of which 3 are pinned" in refused
    assert "pin" in board.pin(5, 5), "the last page of the budget"
    assert "pin" in board.pin(1, 1), "it needs none"
    assert "refused" in board.pin(1, 1, 9, 9), "one would be missing"
    assert board.pins.num_refused == 3


def test_a_node_is_pinned_within_the_budget():
    board = Board(budget=3)
    board.keep(1, 1, 2, 2)
    board.keep(1, 1, 3, 3, namespace=T)
    first, second = board.tree.nodes()
    made = board.pins.pin_node(first)["pin"]
    assert (made["tokens"], made["name"], made["expires_in_s"]) == (4, None, None)
    assert "would hold 4 pages" in board.pins.pin_node(second)["refused"]
    assert board.pins.num_refused == 1
    assert board.pins.pins[made["id"]].namespace == first.namespace != second.namespace
    assert "pin" in board.pins.pin_node(first), "twice as well"
    assert board.pins.unpin(made["id"])
    assert board.tree.num_pinned_pages == 2


def test_a_pin_ends_when_its_time_is_over(board):
    board.pin(1, 1, 2, 2, name="short", ttl_s=5.0)
    board.pin(5, 5, name="long", ttl_s=5.5)
    board.pin(5, 5, 6, 6, name="ever")
    board.now = 104.9
    board.pins.expire()
    assert board.names == ["short", "long", "ever"]
    board.now = 105.0
    board.pins.expire()
    assert board.names == ["long", "ever"]
    board.now = 1e9
    board.pins.expire()
    assert board.names == ["ever"]
    assert board.tree.num_pinned_pages == 2
    assert board.pins.num_broken == 0


def test_several_pins_end_at_once(board):
    for name in ("a", "b", "c"):
        board.pin(1, 1, 2, 2, name=name, ttl_s=5.0)
    board.now += 5
    board.pins.expire()
    assert (board.names, board.tree.num_pinned_pages) == ([], 0)


def test_what_has_expired_takes_nothing_of_the_budget():
    board = Board(budget=2)
    board.keep(1, 1, 2, 2)
    board.keep(3, 3, 4, 4)
    board.pin(1, 1, 2, 2, ttl_s=1.0)
    assert "refused" in board.pin(3, 3, 4, 4)
    board.now += 1
    assert "pin" in board.pin(3, 3, 4, 4)


def test_the_least_recently_used_pin_yields(board):
    for tokens, name in (((1, 1, 2, 2), "a"), ((1, 1, 3, 3), "b"), ((5, 5, 6, 6), "c")):
        board.pin(*tokens, name=name)
    first, _, third = board.pins.pins.values()
    board.tree.use(first.node)
    assert board.pins.yield_one()
    assert board.names == ["a", "c"]
    board.tree.use(third.node)
    assert board.pins.yield_one()
    assert board.names == ["c"]
    assert board.pins.yield_one()
    assert (board.tree.num_pinned_pages, board.pins.num_broken) == (0, 3)
    assert not board.pins.yield_one()
    assert board.pins.num_broken == 3


def test_to_pin_is_a_use_of_the_prefix(board):
    """Once let go, it is not the first to be evicted."""
    made = board.pin(1, 1, 2, 2)["pin"]
    assert board.pins.unpin(made["id"])
    assert not board.pins.unpin(made["id"])
    assert list(board.tree.evict(2)) == [3, 5]
    assert board.pins.num_broken == 0
