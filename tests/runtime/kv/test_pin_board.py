"""The board of pins on a tree without an engine: budget, times to live, and which prefix yields."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radix import Namespace, Quotas, RadixTree, attached_key, path
from radix.node import TOKEN_BYTES
from runtime.kv.pins import PinBoard

A, B, C = Namespace("a"), Namespace("b"), Namespace("c")
PUBLIC = Namespace("public")
ATTACHED = tuple(array("i", attached_key(b"", 1, TOKEN_BYTES)))
EVERYBODY = Namespace()


class Board:
    """A board over a tree with pages of two tokens."""

    def __init__(self, budget: int = 6, quotas: Quotas | None = None):
        self.now = 100.0
        self.tree = RadixTree(2, clock=lambda: self.now, quotas=quotas)
        self.pins = PinBoard(self.tree, budget)
        self.pages = 0

    def compute(self, *tokens: int, namespace: Namespace = EVERYBODY, owner: Namespace | None = None) -> None:
        pages = array("i", range(self.pages, self.pages + len(tokens) // 2))
        self.pages += len(pages)
        self.tree.insert(array("i", tokens).tobytes(), pages, namespace, owner=owner)

    def keep(self, *tokens: int, keeper: Namespace, namespace: Namespace | None = None, ttl_s: float = 10.0):
        """Compute a prefix and keep it; the reason if it is not kept."""
        space = namespace or keeper
        if len(self.tree.match(array("i", tokens).tobytes(), space).pages) < len(tokens) // 2:
            self.compute(*tokens, namespace=space, owner=keeper)
        return self.pins.keep(array("i", tokens), space, keeper, ttl_s)

    def pin(self, *tokens: int, namespace: Namespace = EVERYBODY, name: str | None = None, ttl_s: float | None = None):
        return self.pins.pin(array("i", tokens), namespace, name, ttl_s)

    @property
    def names(self) -> list[str | None]:
        return [pin.name for pin in self.pins.pins.values()]

    def use(self, *tokens: int, user: Namespace, namespace: Namespace | None = None) -> None:
        found = self.tree.match(array("i", tokens).tobytes(), namespace or user)
        node = self.tree.lock_match(found)
        self.tree.use(node)
        self.pins.renew(node, user)
        self.tree.unlock(node)

    @property
    def kept(self) -> int:
        """Pages that stay when all others are flushed."""
        self.pins.expire()
        self.tree.flush()
        return self.tree.num_pages


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def three() -> Board:
    """Three prefixes of four tokens, the first two of which are shared by two."""
    board = Board()
    for tokens in ((1, 1, 2, 2), (1, 1, 3, 3), (5, 5, 6, 6)):
        board.compute(*tokens)
    return board


# -- pins of operators ---------------------------------------------------------------------------------------


def test_a_pin_is_described(three):
    made = three.pin(1, 1, 2, 2, name="one", ttl_s=5.0)
    (pin,) = three.pins.pins.values()
    assert made == {"pin": {"id": pin.id, "name": "one", "tenant": "", "tokens": 4, "hits": 0, "expires_in_s": 5.0}}
    three.now += 3.5
    assert three.pins.describe(pin)["expires_in_s"] == 1.5
    three.now += 3.5
    assert three.pins.describe(pin)["expires_in_s"] == 0.0
    three.tree.use(pin.node)
    assert three.pins.describe(pin)["hits"] == 1
    other = three.pin(5, 5)["pin"]
    assert other == {"id": other["id"], "name": None, "tenant": "", "tokens": 2, "hits": 0, "expires_in_s": None}


def test_no_pin_is_called_like_one_of_another_engine():
    boards = [Board() for _ in range(2)]
    for board in boards:
        board.compute(1, 1)
    ids = [board.pin(1, 1)["pin"]["id"] for board in boards for _ in range(3)]
    assert len(set(ids)) == 6
    assert {len(one) for one in ids} == {len("pin-0123456789abcdef")}
    assert not boards[1].pins.unpin(ids[0])


def test_a_prefix_shorter_than_a_page_is_refused(three):
    assert "shorter than a page of 2 tokens" in three.pin(1)["refused"]
    assert "pin" in three.pin(1, 1)
    assert three.pins.num_refused == 1


def test_the_budget_counts_distinct_pages_and_those_to_come():
    board = Board(budget=4)
    for tokens in ((1, 1, 2, 2), (1, 1, 3, 3), (5, 5, 6, 6)):
        board.compute(*tokens)
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
    board.compute(1, 1, 2, 2)
    board.compute(1, 1, 3, 3, namespace=A)
    first, second = board.tree.nodes()
    made = board.pins.pin_node(first)["pin"]
    assert (made["tokens"], made["name"], made["expires_in_s"]) == (4, None, None)
    assert "would hold 4 pages" in board.pins.pin_node(second)["refused"]
    assert board.pins.num_refused == 1
    assert board.pins.pins[made["id"]].node is first
    assert "pin" in board.pins.pin_node(first), "twice as well"
    assert board.pins.unpin(made["id"])
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
    made = three.pin(1, 1, 2, 2)["pin"]
    assert three.pins.unpin(made["id"])
    assert not three.pins.unpin(made["id"])
    assert list(three.tree.evict(2)) == [3, 5]
    assert three.pins.num_broken == 0


# -- prefixes kept by tenants --------------------------------------------------------------------------------


def test_nobody_renews_what_another_tenant_keeps(board):
    board.keep(1, 1, keeper=A, namespace=PUBLIC)
    board.now += 8
    board.use(1, 1, user=B, namespace=PUBLIC)
    board.now += 3
    assert board.kept == 0


def test_a_tenant_does_not_keep_what_counts_against_the_quota_of_another():
    board = Board(quotas=Quotas({"a": 4, "b": 4}))
    board.compute(1, 1, 2, 2, namespace=PUBLIC, owner=A)
    board.compute(1, 1, 2, 2, 3, 3, namespace=PUBLIC, owner=B)
    assert "quota of another tenant" in board.pins.keep(array("i", [1, 1]), PUBLIC, B, 10.0)
    assert "quota of another tenant" in board.pins.keep(array("i", [1, 1, 2, 2, 3, 3]), PUBLIC, B, 10.0)
    assert board.pins.keep(array("i", [1, 1, 2, 2]), PUBLIC, A, 10.0) is None
    assert board.pins.num_unkept == 2
    assert board.kept == 2


def test_what_is_not_there_is_not_kept(board):
    assert "shorter than a page" in board.keep(1, keeper=A)
    board.compute(1, 1, namespace=A)
    assert "not in the cache" in board.pins.keep(array("i", [1, 1, 2, 2]), A, A, 10.0)
    assert board.pins.kept == {}
    assert board.pins.num_unkept == 2


def test_one_tenant_may_use_what_others_leave_and_yields_beyond_an_equal_share(board):
    for i in range(6):
        assert board.keep(i, i, keeper=A) is None
        board.now += 1
    assert board.keep(9, 9, keeper=A) is not None
    board.use(0, 0, user=A)
    for i in range(3):
        assert board.keep(i, i, keeper=B) is None
    refused = board.keep(3, 3, keeper=B)
    assert "would be 4 pages of 2 tokens; the budget is 3 pages, its share of 6" in refused
    board.tree.flush()
    kept = {(node.namespace, node.key[0]) for node in board.tree.nodes()}
    assert kept == {(A, 0), (A, 4), (A, 5), (B, 0), (B, 1), (B, 2)}, "the least recently used ones yield"
    assert board.keep(7, 7, keeper=C) is None
    assert board.keep(8, 8, keeper=C) is None
    assert "share" in board.keep(9, 9, keeper=C)
    assert (board.pins.num_displaced, board.pins.num_broken) == (5, 0)
    assert sorted(entry["prefixes"] for entry in board.pins.describe_kept()) == [2, 2, 2]


def test_a_node_that_is_let_go_takes_pins_and_keeps_with_it(board):
    board.keep(1, 1, keeper=A)
    board.keep(1, 1, 2, 2, keeper=A)
    made = board.pins.pin(array("i", [1, 1, 2, 2]), A, None, None)["pin"]
    (deepest,) = [node for node in board.tree.nodes() if not node.children]
    assert board.pins.unpin_node(deepest) == [made["id"]]
    assert board.kept == 1
    board.pins.unpin_all()
    assert board.kept == 0


def test_a_tenant_loses_its_pins_and_what_it_keeps_and_no_other_does(board):
    for tenant in (A, B):
        board.keep(1, 1, keeper=tenant)
        board.compute(2, 2, namespace=tenant._replace(salt="salt"))
        assert "pin" in board.pin(2, 2, namespace=tenant._replace(salt="salt"))
    board.pins.unpin_all("a")
    assert [pin.owner for pin in board.pins.pins.values()] == [keeper for keeper, _ in board.pins.kept] == [B]


class Pinning(RuleBasedStateMachine):
    """Operators pin and tenants keep, on a tree with pages of one token.

    The model: by tenant and kept prefix, its time to live and when it ends; by id, a pin's pages and when it ends.
    """

    BUDGET = 6

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.tree = RadixTree(1, clock=lambda: self.now)
        self.board = PinBoard(self.tree, self.BUDGET)
        self.kept: dict[tuple[Namespace, tuple[int, ...]], tuple[float, float]] = {}
        self.pins: dict[str, tuple[set, float]] = {}
        self.next_page = 0

    tenants = st.sampled_from([A, B, C])
    # Few, so that prefixes share pages, and more than fit together.
    # With a star: and what is attached behind them, as the states of hybrid models are.
    tokens = st.sampled_from(["0", "0*", "00", "00*", "0000", "0001", "0001*", "011", "1", "1000", "111", "111*"]).map(
        lambda text: (*map(int, text.removesuffix("*")), *(ATTACHED if "*" in text else ()))
    )

    def pages_of(self, tenant, tokens):
        return {(tenant, tokens[: end + 1]) for end in range(len(tokens))}

    def kept_pages(self, tenant=None):
        """Pages that are kept, by one tenant or all."""
        return set().union(*(self.pages_of(*key) for key in self.kept if tenant in (None, key[0])))

    def pinned_pages(self):
        return set().union(*(pages for pages, _ in self.pins.values()))

    def used(self, key):
        ttl_s, expires_s = self.kept[key]
        return expires_s - ttl_s

    def expire(self):
        self.board.expire()
        self.kept = {key: times for key, times in self.kept.items() if times[1] > self.now}
        self.pins = {pin: entry for pin, entry in self.pins.items() if entry[1] > self.now}

    def compute(self, tenant, tokens):
        pages = array("i", range(self.next_page, self.next_page + len(tokens)))
        self.next_page += len(tokens)
        self.tree.insert(array("i", tokens).tobytes(), pages, tenant)

    def real(self):
        """The board's kept prefixes, in the model's form."""
        found = {}
        for pin in self.board.kept.values():
            prefix = [token for node in reversed(list(path(pin.node))) for token in array("i", node.key)]
            found[pin.owner, tuple(prefix)] = pin.ttl_s, pin.expires_s
        return found

    def displaced(self, fits):
        """The last uses of what the board has displaced."""
        gone = {key: self.used(key) for key in self.kept.keys() - self.real().keys()}
        assert not (gone and fits), "what there is room for takes nothing away"
        return gone

    @rule(tenant=tenants, tokens=tokens, ttl_s=st.sampled_from([2.0, 8.0]))
    def keep(self, tenant, tokens, ttl_s):
        self.compute(tenant, tokens)
        self.expire()
        wanted, pinned = self.pages_of(tenant, tokens), self.pinned_pages()
        why = self.board.keep(array("i", tokens), tenant, tenant, ttl_s)
        share = (self.BUDGET - len(pinned)) // len({keeper for keeper, _ in self.kept} | {tenant})
        fits = len(pinned | self.kept_pages() | wanted) <= self.BUDGET
        assert (why is None) == (fits or len(self.kept_pages(tenant) | wanted) <= share)
        gone = self.displaced(fits)
        for keeper, _ in gone:
            assert keeper != tenant
            assert len(self.kept_pages(keeper)) > share, "within its share a tenant loses nothing"
            oldest = min((key for key in self.kept if key[0] == keeper), key=self.used)
            assert oldest in gone, "the least recently used go first"
        self.kept = {key: times for key, times in self.kept.items() if key not in gone}
        if why is None:
            self.renew(tenant, tokens)
            ttl_s = max(ttl_s, self.kept.get((tenant, tokens), (0.0, 0.0))[0])
            self.kept[tenant, tokens] = ttl_s, self.now + ttl_s

    def renew(self, tenant, tokens):
        for (keeper, prefix), (ttl_s, _) in list(self.kept.items()):
            plain = prefix[: len(prefix) - len(ATTACHED)] if prefix[-1] == ATTACHED[-1] else prefix
            if keeper == tenant and tokens[: len(plain)] == plain:
                self.kept[keeper, prefix] = ttl_s, self.now + ttl_s

    @rule(tenant=tenants, tokens=tokens)
    def use(self, tenant, tokens):
        self.expire()
        match = self.tree.match(array("i", tokens).tobytes(), tenant)
        node = self.tree.lock_match(match)
        self.board.renew(node, tenant)
        self.tree.unlock(node)
        self.renew(tenant, tokens[: len(match.pages)])

    @rule(tenant=tenants, tokens=tokens, ttl_s=st.sampled_from([None, 1.0, 3.0]))
    def pin(self, tenant, tokens, ttl_s):
        self.expire()
        wanted = self.pages_of(tenant, tokens)
        missing = len(wanted) - len(self.tree.match(array("i", tokens).tobytes(), tenant).pages)
        answer = self.board.pin(array("i", tokens), tenant, None, ttl_s)
        all_pins = self.pinned_pages() | wanted
        assert ("refused" in answer) == (len(all_pins) > self.BUDGET)
        gone = self.displaced("refused" in answer or len(all_pins | self.kept_pages()) <= self.BUDGET)
        left = [self.used(key) for key in self.kept if key not in gone]
        assert all(used <= min(left, default=used) for used in gone.values()), "the least recently used go first"
        self.kept = {key: times for key, times in self.kept.items() if key not in gone}
        if missing and "refused" not in answer:
            assert answer == {"missing_tokens": missing}
            self.compute(tenant, tokens)
            answer = self.board.pin(array("i", tokens), tenant, None, ttl_s)
        if "pin" in answer:
            self.pins[answer["pin"]["id"]] = wanted, self.now + (ttl_s or 1e9)

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 9))
    def unpin(self, which):
        self.expire()
        if self.pins:
            pin = list(self.pins)[which % len(self.pins)]  # by age: ids are random, and examples must repeat
            del self.pins[pin]
            assert self.board.unpin(pin)
            assert not self.board.unpin(pin)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def make_way(self):
        """A live request needs room: kept prefixes go first, and one at a time."""
        self.expire()
        assert self.board.yield_one() == bool(self.kept or self.pins)
        if self.kept:
            (gone,) = self.displaced(False)
            assert self.used(gone) == min(map(self.used, self.kept))
            del self.kept[gone]
        elif self.pins:
            (gone,) = self.pins.keys() - self.board.pins.keys()
            del self.pins[gone]

    @rule()
    def flush(self):
        self.expire()
        self.tree.flush()
        assert self.tree.num_pages == self.tree.num_pinned_pages

    def teardown(self):
        """Whatever has happened, all that has a time to live ends by itself, the earliest first."""
        for _ in range(3):
            self.now += 3.0
            self.expire()
            self.agrees()
        assert not self.kept

    @invariant()
    def agrees(self):
        self.tree.check()
        assert self.real() == self.kept
        assert self.board.pins.keys() == self.pins.keys()
        assert self.tree.num_pinned_pages == len(self.kept_pages() | self.pinned_pages()) <= self.BUDGET


TestPinning = Pinning.TestCase
TestPinning.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
