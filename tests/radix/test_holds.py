"""Held nodes are evicted last, until their time is over, within a budget; whatever the policy."""

from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix import POLICIES, Holds, Match, Namespace, Quotas, RadixTree, attached_key, make_policy, path
from radix.inspection import view
from radix.node import TOKEN_BYTES, Node
from tests.radix.trees import key

A = Namespace("a")


class Cache:
    """A tree of one-token pages, whose clock is set by hand. `budget` 0: nothing can be held."""

    def __init__(self, policy: str = "lru", budget: int = 100, quotas: Quotas | None = None):
        self.now_s = 0.0
        self.tree = RadixTree(1, make_policy(policy, 100), lambda: self.now_s, quotas)
        self.holds = Holds(self.tree, budget) if budget else None
        self._pages = iter(range(10**6))

    def add(self, *tokens: int, hold_s: float = 0.0, namespace: Namespace = Namespace()) -> None:
        """A request: its tokens enter the tree, or are there; it ends at once."""
        pages = array("i", [next(self._pages) for _ in tokens])
        node, _ = self.tree.insert(key(*tokens), pages, namespace, cost=1.0 + tokens[0])
        self.tree.lock(node)
        if hold_s and self.holds is not None:
            self.holds.hold(node, hold_s)
        self.tree.unlock(node)

    def keep(self, *tokens: int, seconds: float) -> bool:
        match = self.tree.match(key(*tokens))
        return len(match.pages) == len(tokens) and self.holds.keep(match, seconds)

    def use(self, *tokens: int) -> None:
        node = self.tree.lock_match(self.tree.match(key(*tokens)))
        self.holds.renew(node)
        self.tree.unlock(node)

    def pin(self, node: Node) -> None:
        self.holds.pinned(node, -1)
        self.tree.pin(node)
        self.holds.fit()

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        self.holds.pinned(node, 1)

    def has(self, *tokens: int, namespace: Namespace = Namespace()) -> int:
        """How many of the tokens are cached."""
        return len(self.tree.match(key(*tokens), namespace).pages)

    def held_s(self) -> dict[int, float]:
        """By first token of each node."""
        return {int.from_bytes(node.preview[:4], "little"): node.held_s for node in view(self.tree, preview_tokens=1)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [0, 4])
def test_what_is_held_survives_the_pressure_that_evicts_it_otherwise(policy, budget):
    cache = Cache(policy, budget)
    cache.add(1, 2, 3, hold_s=60)
    for i in range(10, 40, 2):
        cache.now_s += 1
        cache.add(i, i + 1)
        cache.tree.evict(max(cache.tree.num_pages - 8, 0))
    assert cache.has(1, 2, 3) == (3 if budget else 0)


def test_the_budget_takes_holds_from_children_first_after_a_split_too():
    cache = Cache(budget=4)
    cache.add(1, 2, hold_s=60)
    cache.add(1, 2, 3, 4, hold_s=60)
    cache.add(1, 2, 3, 7)
    cache.add(8, 9, hold_s=60)
    assert cache.holds is not None
    cache.holds.check()
    assert cache.held_s() == {1: 60, 3: 0, 4: 0, 7: 0, 8: 60}


def test_ends_are_those_of_the_longest_held_paths():
    cache = Cache()
    cache.add(1, 2, hold_s=60)
    cache.add(1, 2, 3, hold_s=30)
    cache.add(1, 2, 4)
    assert cache.holds is not None
    assert [node.key for node in cache.holds.ends()] == [key(3)]
    cache.now_s = 40
    assert [node.key for node in cache.holds.ends()] == [key(1, 2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hold_that_has_ended_is_worth_nothing(policy):
    cache, other = Cache(policy), Cache(policy, budget=0)
    for one in (cache, other):
        for i in range(8):
            one.add(i, hold_s=5)
        one.now_s = 5.0
        one.add(1)
    assert list(cache.tree.evict(8)) == list(other.tree.evict(8))


def test_what_was_put_aside_while_it_was_held_takes_its_place_again():
    cache = Cache()
    cache.add(1, hold_s=5)
    for i in (2, 3):
        cache.add(i)
    assert (len(cache.tree.evict(1)), cache.has(1), cache.has(2)) == (1, 1, 0)
    cache.now_s = 5.0
    assert (len(cache.tree.evict(1)), cache.has(1), cache.has(3)) == (1, 0, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_held_nodes_go_when_nothing_else_is_left_the_longest_unused_first(policy):
    cache = Cache(policy)
    for i in (1, 2, 3):
        cache.add(i, hold_s=100 - i)
    cache.add(2, hold_s=1)  # used again; its longer hold stays
    cache.add(4)
    assert cache.held_s() == {1: 99, 2: 98, 3: 97, 4: 0}
    assert cache.tree.num_evictable_pages == 4
    gone = [[i for i in (1, 2, 3, 4) if not cache.has(i)] for _ in range(3) if len(cache.tree.evict(1))]
    assert gone == [[4], [1, 4], [1, 3, 4]]
    assert (cache.holds.num_pages, cache.holds.num_broken) == (1, 2)
    cache.tree.flush()
    assert (cache.holds.num_pages, cache.holds.num_broken) == (0, 2)
    cache.holds.check()


def test_a_hold_is_of_the_whole_path_and_stays_with_what_is_left_of_a_node():
    cache = Cache()
    cache.add(1, 2, 3, 4, hold_s=10)
    cache.add(1, 2, 9)  # splits the node
    assert cache.held_s() == {1: 10, 3: 10, 9: 0}
    cache.holds.check()
    cache.now_s = 4.0
    cache.add(1, 2, 9, hold_s=10)
    assert cache.held_s() == {1: 10, 3: 6, 9: 10}
    cache.tree.evict(1)
    assert cache.held_s() == {1: 10, 3: 6, 9: 10}, "the end of a node went"
    assert (cache.has(1, 2, 3, 4), cache.holds.num_pages, cache.holds.num_broken) == (3, 4, 1)
    cache.now_s = 10.0
    cache.holds.expire()
    assert (cache.held_s(), cache.holds.num_pages) == ({1: 4, 3: 0, 9: 4}, 3)
    cache.holds.check()


def test_beyond_the_budget_the_longest_unused_lose_their_hold():
    cache = Cache(budget=5)
    for i in (1, 2, 3):
        cache.add(i, 10 + i, hold_s=1000 if i == 1 else 50)
    assert cache.held_s() == {1: 0, 2: 50, 3: 50}, "also if it was for longer"
    assert (cache.holds.num_pages, cache.holds.num_lost) == (4, 2)
    cache.add(2, 12, hold_s=50)
    cache.add(4, hold_s=50)
    cache.add(5, hold_s=50)
    assert cache.held_s() == {1: 0, 2: 50, 3: 0, 4: 50, 5: 50}
    cache.add(*range(20, 30), hold_s=50)
    assert cache.holds.num_pages == 0, "a node is held as a whole, or not"
    cache.holds.check()


def test_holds_of_a_path_longer_than_the_budget_are_those_of_its_beginning():
    cache = Cache(budget=3)
    for end in (2, 4, 6):
        cache.add(*range(end))
    cache.add(*range(6), hold_s=9)
    assert cache.held_s() == {0: 9, 2: 0, 4: 0}
    cache.holds.check()


@pytest.mark.parametrize("held", [False, True])
def test_a_tenant_over_its_quota_loses_what_it_does_not_hold_first(held):
    cache = Cache(quotas=Quotas({"a": 3}))
    cache.add(1, hold_s=50 * held, namespace=A)
    for i in (2, 3):
        cache.add(i, namespace=A)
    cache.add(9, hold_s=50)
    for i in (4, 5):
        cache.tree.make_room(A, 1)
        cache.add(i, namespace=A)
    assert (cache.has(1, namespace=A), cache.tree.quotas.pages(A)) == (int(held), 3)
    cache.tree.make_room(A, 3)
    assert (cache.tree.quotas.pages(A), cache.has(9)) == (0, 1), "held pages count, and go for the tenant's own"


def test_nothing_is_remembered_of_what_left():
    cache = Cache(budget=10)
    for i in range(1000):
        cache.add(i, hold_s=1000)
        cache.tree.evict(cache.tree.num_pages - 5)
        cache.holds.check()
    assert len(cache.holds._ends) <= 4 * 10 + 65


def test_a_hold_that_slides_is_renewed_by_each_use_and_plain_ones_are_not():
    cache = Cache()
    cache.add(1, 2, hold_s=10)
    cache.add(3, 4)
    assert cache.keep(3, 4, seconds=10)
    assert cache.keep(3, seconds=4), "the shorter time stays the shorter one's own"
    cache.now_s = 8
    cache.use(1, 2)
    cache.use(3)
    assert cache.held_s() == {1: 2, 3: 10, 4: 2}
    cache.use(3, 4)
    cache.now_s = 17
    assert cache.holds.sums() == [(Namespace(), 2, 2)]
    cache.holds.expire()
    assert cache.held_s() == {1: 0, 3: 1, 4: 1}
    cache.now_s = 18
    cache.holds.expire()
    assert cache.holds.kept == set()
    assert {node.expired_s for node in cache.tree.nodes()} == {10, 18}


def test_the_first_hold_comes_to_a_tree_in_use():
    """The orders of victims, also of tenants with quotas, are there before it."""
    cache = Cache(quotas=Quotas({"a": 3}))
    for i in (1, 2, 3):
        cache.add(i, namespace=A)
    (first,) = [node for node in cache.tree.nodes() if node.key == key(1)]
    cache.holds.hold(first, 50)
    cache.tree.make_room(A, 1)
    assert (cache.has(1, namespace=A), cache.has(2, namespace=A)) == (1, 0)
    cache.tree.evict(1)
    assert (cache.has(1, namespace=A), cache.has(3, namespace=A)) == (1, 0)
    cache.tree.make_room(A, 3)
    assert cache.tree.num_pages == 0


def test_a_use_renews_what_is_attached_to_its_path():
    """Such as the states of hybrid models, which no prompt's own tokens reach."""
    cache = Cache()
    cache.add(1, 2)
    tokens = tuple(array("i", attached_key(b"", 1, TOKEN_BYTES)))
    cache.add(1, 2, *tokens)
    assert cache.keep(1, 2, *tokens, seconds=10)
    cache.now_s = 8
    cache.use(1, 2)
    assert {node.held_until_s for node in cache.tree.nodes()} == {18}
    cache.holds.check()


def test_pins_and_holds_share_a_budget_in_which_pins_go_first():
    cache = Cache(budget=4)
    cache.add(1, 2, 3)
    cache.add(7, 8)
    assert not cache.keep(1, 2, 3, 4, seconds=9), "not all of it is there"
    assert cache.keep(1, 2, 3, seconds=9)
    (first,) = [node for node in cache.tree.nodes() if len(node.pages) == 3]
    cache.pin(first)
    assert (cache.holds.num_pages, cache.tree.num_pinned_pages) == (0, 3), "a page counts once"
    assert not cache.keep(7, 8, seconds=9), "it needs more than pins leave"
    assert cache.keep(7, seconds=9)
    (second,) = [node for node in cache.tree.nodes() if node.key == key(8)]
    cache.unpin(first)
    cache.holds.check()
    assert (cache.holds.num_pages, cache.holds.num_kept_lost) == (4, 0)
    cache.pin(second)
    assert cache.held_s() == {1: 0, 7: 9, 8: 0}, "the oldest hold gives way to a pin"
    assert cache.holds.num_kept_lost == 1
    cache.holds.check()


def test_holds_of_a_node_that_is_let_go_end_with_those_below_it():
    cache = Cache()
    for tokens in ((1,), (1, 2), (1, 2, 3), (1, 4)):
        cache.add(*tokens, hold_s=9)
    (node,) = [node for node in cache.tree.nodes() if node.key == key(2)]
    cache.holds.release(node)
    assert cache.held_s() == {1: 9, 2: 0, 3: 0, 4: 9}
    cache.holds.check()


class Lives(RuleBasedStateMachine):
    """Random lives of one owner. The model: by page, when its hold ends and when its node was last used with a hold."""

    @initialize(policy=st.sampled_from(POLICIES), budget=st.integers(1, 12), quota=st.sampled_from([None, 4]))
    def start(self, policy, budget, quota):
        self.cache = Cache(policy, budget, None if quota is None else Quotas({"a": quota}))
        self.tree, self.holds = self.cache.tree, self.cache.holds
        self.until: dict[int, float] = {}
        self.used: dict[int, tuple[int, int]] = {}
        self.live, self.serial, self.pins = [], 0, []

    def ends(self):
        return {node.pages[-1] for node in self.tree.nodes()}

    def parted(self, before):
        """The upper part of a held node that was split counts as used."""
        self.serial += 1
        for node in self.tree.nodes():
            if node.children and node.pages[-1] not in before:
                self.used |= dict.fromkeys(node.pages, (self.serial, 0))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7), space=st.sampled_from([A, A._replace(salt="s")]))
    def begin(self, tokens, space):
        before = self.ends()
        self.forget(self.tree.make_room(space, len(tokens)))
        pages = array("i", [next(self.cache._pages) for _ in tokens])
        node, _ = self.tree.insert(key(*tokens), pages, space)
        self.tree.lock(node)
        self.live.append(node)
        self.parted(before | {node.pages[-1]})

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), hold_s=st.sampled_from([0.0, 1.0, 2.0, 6.0]))
    def end(self, which, hold_s):
        node = self.live.pop(which % len(self.live))
        if hold_s:
            self.serial += 1
            for depth, above in enumerate(reversed(list(path(node)))):
                self.used |= dict.fromkeys(above.pages, (self.serial, -depth))
                end_s = self.cache.now_s + hold_s
                self.until |= {page: max(self.until.get(page, 0.0), end_s) for page in above.pages}
            self.holds.hold(node, hold_s)
            self.check_losses()
        self.tree.unlock(node)

    def check_losses(self):
        """Only what exceeds the budget is lost: by the owner with most of it, the longest unused first."""
        wanted = [node for node in self.tree.nodes() if node.pages[0] in self.until and not node.pins]
        wanted.sort(key=lambda node: self.used[node.pages[0]])
        room = self.holds.budget_pages - self.tree.num_pinned_pages
        while sum(len(node.pages) for node in wanted) > room:
            pages = Counter[Namespace]()
            for node in wanted:
                pages[node.namespace.owner] += len(node.pages)
            most = [node for node in wanted if pages[node.namespace.owner] == max(pages.values())]
            # Of owners with equally many, any may lose.
            lost = next((node for node in most if not node.held_until_s), most[0])
            wanted.remove(lost)
            for page in lost.pages:
                del self.until[page]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def pin(self, which):
        node = self.live[which % len(self.live)]
        match = Match(node=node, node_pages=len(node.pages))
        if self.tree.num_pinned_pages + self.tree.num_new_pinned_pages(match) <= self.holds.budget_pages:
            self.cache.pin(node)
            self.pins.append(node)
            self.check_losses()

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 9))
    def unpin(self, which):
        self.cache.unpin(self.pins.pop(which % len(self.pins)))

    @rule(count=st.integers(1, 5))
    def evict(self, count):
        freed = self.tree.evict(count)
        self.check_last(freed, [node for node in self.tree.nodes() if node.is_free_leaf])
        self.forget(freed)

    @rule(coming=st.integers(0, 3))
    def make_room(self, coming):
        freed = self.tree.make_room(A, coming)
        self.check_last(freed, [node for node in self.tree.nodes() if node.is_free_leaf and node.owner == A])
        self.forget(freed)

    def check_last(self, freed, left):
        """A held page went only if everything else that could go had gone."""
        if any(page in self.until for page in freed):
            assert all(node.pages[0] in self.until for node in left)

    @rule()
    def flush(self):
        self.forget(self.tree.flush())

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.cache.now_s += seconds
        self.until = {page: end_s for page, end_s in self.until.items() if end_s > self.cache.now_s}

    def forget(self, freed):
        self.until = {page: end_s for page, end_s in self.until.items() if page not in set(freed)}

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        self.tree.check()
        self.holds.expire()
        self.holds.check()
        held = {page: node.held_until_s for node in self.tree.nodes() if node.held_until_s for page in node.pages}
        assert held == self.until


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_one_owner_does_not_take_the_holds_of_another():
    """However many salts it uses."""
    cache = Cache(budget=6)
    cache.add(1, 2, hold_s=60, namespace=Namespace("b"))
    for i in range(10, 30):
        cache.add(i, i + 1, hold_s=60, namespace=Namespace("a", salt=str(i)))
        cache.holds.check()
    assert (cache.holds.num_pages, cache.holds.num_lost) == (6, 36)
    cache.tree.evict(cache.tree.num_pages - 6)
    assert cache.has(1, 2, namespace=Namespace("b")) == 2
    assert cache.has(28, 29, namespace=Namespace("a", salt="28")) == 2
