"""A tenant over its quota gives up its own pages, and nobody else's."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radix import Namespace, Quotas, RadixTree
from radix.eviction import LRU
from tests.radix.trees import key

A, B = Namespace("a"), Namespace("b")


def test_by_how_much_an_owner_is_over():
    quotas = Quotas({"a": 4}, default=2)
    quotas.add(A, 3)
    assert [quotas.over(A, coming) for coming in (0, 1, 2, 9)] == [0, 0, 1, 8]
    assert [quotas.over(B, coming) for coming in (2, 3)] == [0, 1]
    assert Quotas({"a": 4}).over(B, 99) == 0
    assert Quotas({"a": 0}).over(A, 2) == 2, "to have nothing is a limit, too"
    assert (quotas.pages(A), quotas.pages(Namespace("a", "salt")), quotas.pages(B)) == (3, 3, 0)


def test_nothing_is_kept_of_owners_without_pages():
    tree = RadixTree(1, quotas=Quotas({"a": 2}))
    for i, owner in enumerate((A, B)):
        tree.insert(key(1), array("i", [i]), owner)
    assert (len(tree.quotas._pages), tree.quotas._victims.keys()) == (2, {A}), "no order is kept without a limit"
    tree.flush()
    assert (tree.quotas._pages, tree.quotas._victims) == ({}, {})


class Newest(LRU):
    def enter(self, node):
        self.order.push(-node.last_use, node)


def test_victims_of_a_tenant_are_its_own_least_recently_used_whatever_the_policy():
    tree = RadixTree(1, Newest(), quotas=Quotas({"a": 3}))
    for i in range(3):
        tree.insert(key(i), array("i", [i]), A)
    tree.insert(key(7), array("i", [7]), B)
    tree.touch(tree.match(key(0), A).node)
    assert list(tree.make_room(A, 1)) == [1]
    assert list(tree.make_room(A, 3)) == [2, 0]
    assert tree.stats.evicted == {"room": 0, "quota": 3, "flush": 0}
    assert list(tree.evict(5)) == [7]


class Tenants(RuleBasedStateMachine):
    """Tenants with keys, and salts of an open server, in their own namespaces and the public one.

    The model: the page and the owner of each page-aligned prefix.
    """

    MOST = 5

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(1, quotas=Quotas({"b": 3}, default=self.MOST))
        self.held: dict[tuple, tuple[int, Namespace]] = {}
        self.live: list = []
        self.pages = iter(range(10**6))

    @rule(
        account=st.sampled_from(["", "a", "b"]),
        salt=st.sampled_from(["", "s", "t"]),
        entry=st.sampled_from(["", "bicache"]),
        public=st.booleans(),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=7),
        stays=st.booleans(),
    )
    def request(self, account, salt, entry, public, tokens, stays):
        space = Namespace("public" if public else account, salt)
        owner = Namespace(account) if account else space.owner
        space = space.for_entry(entry, "1") if entry else space
        prefixes = [(space, *tokens[: n + 1]) for n in range(len(tokens))]
        self.forget(self.tree.make_room(owner, len(tokens)), owner)
        pages = [next(self.pages) for _ in tokens]
        node, held = self.tree.insert(key(*tokens), array("i", pages), space, owner=owner)
        for prefix, page in zip(prefixes, pages, strict=True):
            self.held.setdefault(prefix, (page, owner))
        assert list(held) == [self.held[prefix][0] for prefix in prefixes]
        self.tree.lock(node)
        self.live.append((node, owner))
        if not stays:
            self.end(-1)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def end(self, which):
        node, owner = self.live.pop(which % len(self.live))
        self.tree.unlock(node)
        self.forget(self.tree.make_room(owner, 0), owner)

    @rule()
    def flush(self):
        self.forget(self.tree.flush())

    def forget(self, freed, owner=None):
        gone = {prefix for prefix, (page, _) in self.held.items() if page in set(freed)}
        assert all(owner in (None, self.held[prefix][1]) for prefix in gone), "nobody loses pages of others"
        self.held = {prefix: held for prefix, held in self.held.items() if prefix not in gone}

    def count(self, owner):
        return sum(whose == owner for _, whose in self.held.values())

    def kept(self, owner):
        """Pages of an owner that live requests use, or that pages of others continue."""
        ends = [prefix for prefix, (_, whose) in self.held.items() if whose != owner]
        ends += [max((p for p, (page, _) in self.held.items() if page in node.pages), key=len) for node, _ in self.live]
        mine = (prefix for prefix, (_, whose) in self.held.items() if whose == owner)
        return sum(any(end[: len(prefix)] == prefix for end in ends) for prefix in mine)

    @invariant()
    def agrees(self):
        self.tree.check()
        owners = {owner for _, owner in self.held.values()}
        assert self.tree.quotas._pages == {owner: self.count(owner) for owner in owners}
        assert self.tree.quotas._victims.keys() <= owners
        for owner in owners - {owner for _, owner in self.live}:
            assert self.count(owner) <= max(3 if owner.tenant == "b" else self.MOST, self.kept(owner))


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
