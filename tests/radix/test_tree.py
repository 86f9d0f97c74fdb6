"""The tree and its watchers against brute-force dictionaries of sequences, and small cases by hand."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from radix import POLICIES, EventLog, Gone, Namespace, Quotas, RadixTree, Stored, make_policy, path
from radix.gone import Left
from radix.hashes import block_hashes
from radix.node import Node
from tests.radix.trees import key


def insert(tree: RadixTree, tokens: list[int], pages: list[int], namespace: Namespace = Namespace()):
    return tree.insert(key(*tokens), array("i", pages), namespace)


def test_a_pin_of_a_run_s_beginning_adds_its_own_pages_alone():
    tree = RadixTree(1)
    tree.insert(key(1, 2, 3, 4, 5, 6), array("i", range(6)))
    beginning = tree.match(key(1, 2))
    assert tree.num_new_pinned_pages(beginning) == 2
    node = tree.lock_match(beginning)
    tree.pin(node)
    tree.unlock(node)
    assert (tree.num_pinned_pages, tree.num_new_pinned_pages(tree.match(key(1, 2, 3, 4, 5, 6)))) == (2, 4)


def test_a_node_that_left_has_no_tokens_whoever_still_keeps_it():
    tree = RadixTree(1)
    node, _ = insert(tree, [1, 2], [0, 1])
    tree.flush()
    assert (node.key, node.parent) == (b"", None)


def test_partial_page_among_many_children_is_the_longest():
    tree = RadixTree(4)
    for i in range(40):
        insert(tree, [1, i % 5, i, 0], [i])
    match = tree.match(key(1, 3, 13, 7))
    assert (match.partial_page, match.partial_rows) == (13, 3)
    tree.evict(20)
    tree.check()
    match = tree.match(key(1, 3, 38, 7))
    assert (match.partial_page, match.partial_rows) == (38, 3)


T = Namespace("t")
NAMESPACES = [Namespace(), T, T.for_entry("kind", "1")]


def text_of(node: Node) -> bytes:
    return b"".join(reversed([above.key for above in path(node)]))


class Shelf:
    """Reads pages that leave while they are whole, as a tier would: their prefixes, numbers and causes."""

    def __init__(self):
        self.taken: set[tuple[Namespace, bytes, int, str]] = set()

    def stored(self, node: Node) -> None:
        assert node.pages

    def leaving(self, node: Node, kept_pages: int, cause: str) -> None:
        text, size = text_of(node), len(node.key) // len(node.pages)
        assert node.is_free_leaf
        for i in range(kept_pages, len(node.pages)):
            end = len(text) - len(node.key) + (i + 1) * size
            self.taken.add((node.namespace, text[:end], node.pages[i], cause))


class Mirror:
    """Blocks by hash, with their parents and tokens, kept from events alone."""

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


class TreeMachine(RuleBasedStateMachine):
    """Random operations on a tree with watchers.

    The model: dictionaries from page-aligned prefixes to pages, to their uses, and to when and why they last left.
    """

    sequences = Bundle("sequences")
    locks = Bundle("locks")
    pins = Bundle("pins")

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        policy=st.sampled_from(POLICIES),
        quota=st.sampled_from([None, 1, 5]),
    )
    def start(self, page_size, policy, quota):
        self.page_size = page_size
        self.now = 0.0
        self.quota = quota
        quotas = None if quota is None else Quotas({"t": quota})
        self.log, self.shelf, self.mirror = EventLog(), Shelf(), Mirror(4 * page_size)
        self.gone = Gone(4 * page_size, lambda: self.now, 1 << 16)
        watchers = (self.log, self.shelf, self.gone)
        self.tree = RadixTree(page_size, make_policy(policy, 16), lambda: self.now, quotas, watchers)
        self.next_page = 0
        self.held: dict[tuple, int] = {}
        self.uses: dict[tuple, int] = {}
        self.left: dict[tuple, Left] = {}
        self.pinned: list = []
        self.locked: list = []

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, 2), max_size=14),
        ns=st.sampled_from(NAMESPACES),
    )
    def sequence(self, tokens, ns):
        return tokens, ns

    @rule(target=sequences, base=sequences, tail=st.lists(st.integers(0, 2), max_size=6), cut=st.integers(0, 14))
    def relative(self, base, tail, cut):
        return base[0][:cut] + tail, base[1]

    def prefixes(self, tokens, ns):
        return [(ns, *tokens[:n]) for n in range(self.page_size, len(tokens) + 1, self.page_size)]

    @rule(sequence=sequences)
    def insert(self, sequence):
        tokens, ns = sequence
        prefixes = self.prefixes(tokens, ns)
        pages = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(pages)
        _, held = self.tree.insert(key(*tokens), array("i", pages), ns, cost=len(tokens))
        for prefix, page in zip(prefixes, pages, strict=True):
            self.held.setdefault(prefix, page)
            self.uses.setdefault(prefix, 0)
        assert list(held) == [self.held[prefix] for prefix in prefixes]

    @rule(sequence=sequences)
    def match(self, sequence):
        tokens, ns = sequence
        match = self.tree.match(key(*tokens), ns)
        expected = []
        for prefix in self.prefixes(tokens, ns):
            if prefix not in self.held:
                break
            expected.append(self.held[prefix])
        assert list(match.pages) == expected
        done = len(expected) * self.page_size
        rest, best = tokens[done:], 0
        for prefix in self.held:
            if (
                prefix[0] == ns
                and len(prefix) - 1 == done + self.page_size
                and list(prefix[1 : done + 1]) == tokens[:done]
            ):
                page = prefix[1 + done :]
                same = next(
                    (i for i, (a, b) in enumerate(zip(page, rest, strict=False)) if a != b), min(len(page), len(rest))
                )
                best = max(best, same)
        assert match.partial_rows == best
        if best:
            owners = [p for p, page in self.held.items() if page == match.partial_page]
            assert list(owners[0][1 + done : 1 + done + best]) == rest[:best]

    @rule(target=locks, sequence=sequences)
    def lock(self, sequence):
        tokens, ns = sequence
        match = self.tree.match(key(*tokens), ns)
        node = self.tree.lock_match(match)
        prefixes = self.use(node, tokens, ns, len(match.pages))
        if node is None:
            return multiple()
        self.locked.append(prefixes)
        return node, prefixes

    def use(self, node, tokens, ns, num_pages):
        """Use a matched path; returns its prefixes."""
        self.tree.use(node)
        prefixes = set(self.prefixes(tokens, ns)[:num_pages])
        for prefix in prefixes:
            self.uses[prefix] += 1
        return prefixes

    @rule(entry=locks)
    def unlock(self, entry):
        node, prefixes = entry
        at = next((i for i, p in enumerate(self.locked) if p is prefixes), None)
        if at is not None:
            del self.locked[at]
            self.tree.unlock(node)

    @rule(target=pins, sequence=sequences)
    def pin(self, sequence):
        tokens, ns = sequence
        match = self.tree.match(key(*tokens), ns)
        before, added = self.tree.num_pinned_pages, self.tree.num_new_pinned_pages(match)
        node = self.tree.lock_match(match)
        prefixes = self.use(node, tokens, ns, len(match.pages))
        if node is None:
            assert added == 0
            return multiple()
        self.tree.pin(node)
        self.tree.unlock(node)
        assert self.tree.num_pinned_pages == before + added
        self.pinned.append(prefixes)
        return node, prefixes

    @rule(entry=pins)
    def unpin(self, entry):
        node, prefixes = entry
        at = next((i for i, p in enumerate(self.pinned) if p is prefixes), None)
        if at is not None:
            del self.pinned[at]
            self.tree.unpin(node)

    @rule(seconds=st.floats(0.1, 4))
    def wait(self, seconds):
        self.now += seconds

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        evictable = self.tree.num_evictable_pages
        freed = self.tree.evict(count)
        assert len(freed) == min(count, evictable)
        self.forget(freed, "room")

    @rule(coming=st.integers(0, 3))
    def make_room(self, coming):
        freed = self.tree.make_room(T, coming)
        assert all(prefix[0].owner == T for prefix, page in self.held.items() if page in freed)
        self.forget(freed, "quota")
        if self.quota is None:
            assert not freed
        else:
            kept = sum(prefix[0].owner == T for prefix in set().union(*self.locked, *self.pinned))
            assert sum(prefix[0].owner == T for prefix in self.held) <= max(self.quota - coming, kept)

    @rule()
    def flush(self):
        self.forget(self.tree.flush(), "flush")
        assert set(self.held) == set().union(*self.locked, *self.pinned)

    @rule(which=st.integers(0, 99))
    def drop(self, which):
        if nodes := list(self.tree.nodes()):
            self.forget(self.tree.drop(nodes[which % len(nodes)]), "flush")

    def forget(self, freed, cause):
        gone = [prefix for prefix, page in self.held.items() if page in freed]
        assert len(gone) == len(freed)
        assert self.shelf.taken == {(ns, key(*tokens), self.held[ns, *tokens], cause) for ns, *tokens in gone}
        self.shelf.taken.clear()
        for prefix in gone:
            del self.held[prefix], self.uses[prefix]
            self.left[prefix] = Left(self.now, cause)

    @invariant()
    def agrees(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert self.tree.num_pages == len(self.held)
        if self.quota is not None:
            assert self.tree.quotas.pages(T) == sum(prefix[0].owner == T for prefix in self.held)
        assert set().union(*self.locked, *self.pinned) <= set(self.held)
        assert self.tree.num_locked_pages == len(set().union(*self.locked, *self.pinned))
        assert self.tree.num_pinned_pages == len(set().union(*self.pinned))
        self.check_uses()
        self.check_watchers()

    def check_uses(self):
        for node in self.tree.nodes():
            tokens = (node.namespace, *array("i", text_of(node)))
            ends = range(len(tokens) - len(node.key) // 4 + self.page_size, len(tokens) + 1, self.page_size)
            assert {self.uses[tokens[:end]] for end in ends} == {node.hits}

    def check_watchers(self):
        """A mirror has the tree's blocks, and of what left the first missing page is known."""
        self.mirror.take(self.log.take())
        blocks = {}
        for ns, *tokens in self.held:
            before, digest = [None, *block_hashes(key(*tokens), 4 * self.page_size, None, ns)][-2:]
            blocks[digest] = before, key(*tokens[-self.page_size :])
        assert self.mirror.blocks == blocks
        for (ns, *tokens), left in self.left.items():
            parent = (ns, *tokens[: -self.page_size])
            if (ns, *tokens) not in self.held and (len(parent) == 1 or parent in self.held):
                assert self.gone.find(key(*tokens), len(tokens) // self.page_size - 1, ns) == left


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=400, stateful_step_count=25, deadline=None)
