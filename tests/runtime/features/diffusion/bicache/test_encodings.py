"""The known encoded prefixes: against looking at the whole tree, and after many salts; their records and states."""

from __future__ import annotations

from array import array

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radix import Namespace, Quotas, RadixTree
from runtime.features.diffusion.bicache.depth_table import NO_TABLE, DepthTable
from runtime.features.diffusion.bicache.encodings import BoundaryStore, Encodings, encoding_of
from runtime.features.diffusion.bicache.measured import ShallowMeta

PAGE = 2
SPACES = [Namespace("t"), Namespace("t", "s")]


def encode(tree: RadixTree, encodings: Encodings, tokens: array[int], space: Namespace, first_page: int) -> None:
    """Store the encoding of some whole pages, as the strategy does."""
    encoding = encoding_of(tokens.tobytes(), space)
    pages = array("i", range(first_page, first_page + len(tokens) // PAGE))
    tree.insert(tokens.tobytes(), pages, encoding, meta=ShallowMeta(len(tokens), NO_TABLE))
    encodings.add(tokens, space, encoding)


class Books(RuleBasedStateMachine):
    """Encodings come and go page by page; the model looks at all that were ever made."""

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(PAGE)
        self.encodings = Encodings(self.tree)
        self.made: dict[Namespace, tuple[Namespace, array]] = {}
        self.pages = 0

    # Few, so that many are parts of others.
    tokens = st.sampled_from(["00", "0000", "000000", "0001", "0101"]).map(lambda text: list(map(int, text)))

    @rule(tokens=tokens, space=st.sampled_from(SPACES))
    def encode(self, tokens, space):
        whole = array("i", tokens)
        encode(self.tree, self.encodings, whole, space, self.pages)
        self.made[encoding_of(whole.tobytes(), space)] = space, whole
        self.pages += len(whole)

    @precondition(lambda self: self.made)
    @rule(which=st.integers(0, 9), pages=st.integers(1, 2))
    def read(self, which, pages):
        """A request reads the beginning of an encoding, whose run is cut there."""
        encoding, (_, made) = list(self.made.items())[which % len(self.made)]
        self.tree.unlock(self.tree.lock_match(self.tree.match(made[: pages * PAGE].tobytes(), encoding)))

    @rule(tokens=tokens, space=st.sampled_from(SPACES), limit=st.sampled_from([3, 6, 6]))
    def look_up(self, tokens, space, limit):
        tokens = array("i", tokens)
        inside = [(e, made) for e, (of, made) in self.made.items() if of == space and made == tokens[: len(made)]]
        whole = [len(made) for e, made in inside if len(made) <= limit and self.encodings.match(made.tobytes(), e)]
        assert self.encodings.discover(tokens, space, limit) == max(whole, default=0)

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        self.tree.evict(count)

    @invariant()
    def agrees(self):
        there = {encoding for encoding, _ in self.tree.roots()}
        assert self.encodings._sizes.keys() == there
        lengths = [n for counts in self.encodings._lengths.values() for n in counts.values()]
        assert (sum(lengths), 0 in lengths) == (len(there), False)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def test_salts_leave_nothing_behind():
    tree = RadixTree(PAGE, quotas=Quotas({}, default=50))
    encodings, tokens = Encodings(tree), array("i", range(4 * PAGE))
    for i in range(3_000):
        salt = Namespace(salt=str(i))
        encode(tree, encodings, tokens, salt, 4 * i)
        tree.evict(tree.num_pages - 40)
        assert encodings.discover(tokens, Namespace(salt=str(i - 20)), len(tokens)) == 0
        assert encodings.discover(tokens, salt, len(tokens)) == len(tokens)
    assert len(encodings) == len(encodings._lengths) == len(tree._roots) == 10
    tree.flush()
    assert encodings._sizes == encodings._lengths == tree._roots == tree.quotas._pages == tree.quotas._victims == {}


# -- the record of a node ----------------------------------------------------------------------------------------

ONE = DepthTable("one", {0: 0, 50: 2, 90: 3}, {50: (1.0, 0.9, 0.75), 90: (1.0, 0.95, 0.8)})


def test_a_split_leaves_the_record_with_both_parts():
    tree, meta = RadixTree(1), ShallowMeta(4, ONE)
    tree.insert(array("i", [1, 2, 3, 4]).tobytes(), array("i", [0, 1, 2, 3]), meta=meta)
    tree.insert(array("i", [1, 2, 9]).tobytes(), array("i", [0, 1, 9]), meta=ShallowMeta(3, ONE))
    found = sorted((len(node.pages), node.meta.encoded_tokens) for node in tree.nodes())
    assert found == [(1, 3), (2, 4), (2, 4)]
    tree.evict(1)
    kept = [node.meta for node in tree.nodes()]
    assert meta in kept, "an eviction takes pages from an end"


def test_operators_see_it():
    shown = ShallowMeta(48, ONE).describe()
    assert shown["encoded_tokens"] == 48
    assert shown["depth_table"] == ONE.version
    assert shown["depths"] == {"0": 0, "50": 2, "90": 3}
    assert shown["similarity"] == {"50": 0.9, "90": 0.8}, "of the last layer that is reused"


# -- boundary states ---------------------------------------------------------------------------------------------

A, B = Namespace(entry="a"), Namespace(entry="b")
ROW = 4 * 2  # bytes of float32 [1, 2]


def states(rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((rows, 2), value)


def filled(max_rows: int) -> BoundaryStore:
    """Three rows of A and two of B, in this order."""
    store = BoundaryStore(max_rows * ROW)
    store.put(A, 1, states(3, 1.0))
    store.put(B, 1, states(2, 2.0))
    return store


def test_the_bound_is_kept_and_the_least_recently_read_goes_first():
    store = filled(5)
    store.put(A, 1, states(3, 9.0))
    assert store.currsize == 5 * ROW, "the same states are counted once"
    assert store.get((A, 3, 1)).tolist() == [[1.0, 1.0]] * 3
    store.put(A, 2, states(1))
    assert (store.get((B, 2, 1)), store.currsize) == (None, 4 * ROW)
    assert (A, 3, 1) in store
    store.put(A, 2, states(6))
    assert store.currsize == 4 * ROW, "too large to be kept, and pushes nothing out"


def test_an_encoding_is_dropped_for_all_depths_and_no_other():
    store = filled(9)
    store.put(A, 2, states(4))
    store.discard(A)
    assert list(store) == [(B, 2, 1)]
    assert store.currsize == 2 * ROW
    nothing = BoundaryStore(0)
    nothing.put(A, 1, states(1))
    assert not nothing
