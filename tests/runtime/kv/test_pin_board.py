"""The board of pins on a tree without an engine: budget, times to live, and which prefix yields."""

from array import array

import pytest

from radix import Holds, Namespace, RadixTree
from runtime.calls import PinView
from runtime.errors import PinRefused
from runtime.kv.pins import PinBoard

A, B = Namespace("a"), Namespace("b")
EVERYBODY = Namespace()


class Board:
    """A board over a tree with pages of two tokens."""

    def __init__(self, budget: int = 6):
        self.now = 100.0
        self.tree = RadixTree(2, clock=lambda: self.now)
        self.holds = Holds(self.tree, budget)
        self.pins = PinBoard(self.tree, self.holds)
        self.pages = 0

    def compute(self, *tokens: int, namespace: Namespace = EVERYBODY) -> None:
        pages = array("i", range(self.pages, self.pages + len(tokens) // 2))
        self.pages += len(pages)
        self.tree.insert(array("i", tokens).tobytes(), pages, namespace)

    def pin(self, *tokens: int, namespace: Namespace = EVERYBODY, name: str | None = None, ttl_s: float | None = None):
        return self.pins.pin(array("i", tokens), namespace, name, ttl_s)

    @property
    def names(self) -> list[str | None]:
        return [pin.name for pin in self.pins.pins.values()]


@pytest.fixture
def three() -> Board:
    """Three prefixes of four tokens, the first two of which are shared by two."""
    board = Board()
    for tokens in ((1, 1, 2, 2), (1, 1, 3, 3), (5, 5, 6, 6)):
        board.compute(*tokens)
    return board


def test_a_pin_is_described(three):
    made = three.pin(1, 1, 2, 2, name="one", ttl_s=5.0)
    (pin,) = three.pins.pins.values()
    assert made == PinView(id=pin.id, name="one", tenant="", tokens=4, hits=0, expires_in_s=5.0)
    three.now += 3.5
    assert three.pins.view(pin).expires_in_s == 1.5
    three.now += 3.5
    assert three.pins.view(pin).expires_in_s == 0.0
    three.tree.use(pin.node)
    assert three.pins.view(pin).hits == 1
    other = three.pin(5, 5)
    assert other == PinView(id=other.id, name=None, tenant="", tokens=2, hits=0, expires_in_s=None)


def test_no_pin_is_called_like_one_of_another_engine():
    boards = [Board() for _ in range(2)]
    for board in boards:
        board.compute(1, 1)
    ids = [board.pin(1, 1).id for board in boards for _ in range(3)]
    assert len(set(ids)) == 6
    assert {len(one) for one in ids} == {len("pin-0123456789abcdef")}
    assert not boards[1].pins.unpin(ids[0])


def test_a_prefix_shorter_than_a_page_is_refused(three):
    with pytest.raises(PinRefused, match="shorter than a page of 2 tokens"):
        three.pin(1)
    assert three.pin(1, 1) is not None
    assert three.pins.num_refused == 1


def test_the_budget_counts_distinct_pages_and_those_to_come():
    board = Board(budget=4)
    for tokens in ((1, 1, 2, 2), (1, 1, 3, 3), (5, 5, 6, 6)):
        board.compute(*tokens)
    assert board.pin(*range(8)) is None, "all of the budget"
    with pytest.raises(PinRefused, match="would hold 5 pages"):
        board.pin(*range(10))
    board.pin(1, 1, 2, 2)
    board.pin(1, 1, 3, 3)
    assert board.tree.num_pinned_pages == 3
    with pytest.raises(PinRefused, match="hold 5 pages of 2 tokens; the budget is 4 pages, of which 3 are pinned"):
        board.pin(5, 5, 6, 6)
    assert board.pin(5, 5) is not None, "the last page of the budget"
    assert board.pin(1, 1) is not None, "it needs none"
    with pytest.raises(PinRefused):  # one would be missing
        board.pin(1, 1, 9, 9)
    assert board.pins.num_refused == 3


def test_a_node_is_pinned_within_the_budget():
    board = Board(budget=3)
    board.compute(1, 1, 2, 2)
    board.compute(1, 1, 3, 3, namespace=A)
    first, second = board.tree.nodes()
    made = board.pins.pin_node(first)
    assert (made.tokens, made.name, made.expires_in_s) == (4, None, None)
    with pytest.raises(PinRefused, match="would hold 4 pages"):
        board.pins.pin_node(second)
    assert board.pins.num_refused == 1
    assert board.pins.pins[made.id].node is first
    assert board.pins.pin_node(first) != made, "twice as well"
    assert board.pins.unpin(made.id)
    assert board.tree.num_pinned_pages == 2


def test_the_least_recently_used_pin_yields(three):
    for tokens, name in (((1, 1, 2, 2), "a"), ((1, 1, 3, 3), "b"), ((5, 5, 6, 6), "c")):
        three.pin(*tokens, name=name)
    first, _, third = three.pins.pins.values()
    three.tree.use(first.node)
    assert three.pins.yield_one()
    assert three.names == ["a", "c"]
    three.tree.use(third.node)
    assert three.pins.yield_one()
    assert three.names == ["c"]
    assert three.pins.yield_one()
    assert (three.tree.num_pinned_pages, three.pins.num_broken) == (0, 3)
    assert not three.pins.yield_one()
    assert three.pins.num_broken == 3


def test_to_pin_is_a_use_of_the_prefix(three):
    """Once let go, it is not the first to be evicted."""
    made = three.pin(1, 1, 2, 2)
    assert three.pins.unpin(made.id)
    assert not three.pins.unpin(made.id)
    assert list(three.tree.evict(2)) == [3, 5]
    assert three.pins.num_broken == 0


def test_a_node_that_is_let_go_takes_pins_and_holds_with_it():
    board = Board()
    board.compute(1, 1)
    board.compute(1, 1, 2, 2)
    for tokens in ((1, 1), (1, 1, 2, 2)):
        assert board.holds.keep(board.tree.match(array("i", tokens).tobytes()), 9.0)
    made = board.pin(1, 1, 2, 2)
    (deepest,) = [node for node in board.tree.nodes() if not node.children]
    assert board.pins.unpin_node(deepest) == [made.id]
    assert (board.holds.num_pages, board.tree.num_pinned_pages) == (1, 0)


def test_a_tenant_loses_its_pins_and_no_other_does():
    board = Board()
    for tenant in (A, B):
        board.compute(2, 2, namespace=tenant._replace(salt="salt"))
        assert board.pin(2, 2, namespace=tenant._replace(salt="salt")) is not None
    board.pins.unpin_all("a")
    assert [pin.owner for pin in board.pins.pins.values()] == [B]


def test_a_pin_ends_with_its_time_to_live():
    board = Board()
    board.compute(1, 1)
    board.pin(1, 1, ttl_s=2.0)
    board.pin(1, 1, ttl_s=4.0)
    for now, left in ((101.5, 2), (102.0, 1), (103.9, 1), (104.0, 0)):
        board.now = now
        board.pins.expire()
        assert (len(board.pins.pins), board.tree.num_pinned_pages) == (left, min(left, 1))
    (node,) = board.tree.nodes()
    assert node.expired_s == 104.0
