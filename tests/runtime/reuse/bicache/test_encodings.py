"""The books of encoded prefixes: against looking at the whole tree, and after many salts."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radix import Namespace, Quotas, RadixTree
from runtime.reuse.bicache.depth_table import NO_TABLE
from runtime.reuse.bicache.encodings import Encodings, encoding_of
from runtime.reuse.bicache.measured import ShallowMeta

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
    for i in range(20_000):
        salt = Namespace(salt=str(i))
        encode(tree, encodings, tokens, salt, 4 * i)
        tree.evict(tree.num_pages - 40)
        assert encodings.discover(tokens, Namespace(salt=str(i - 20)), len(tokens)) == 0
        assert encodings.discover(tokens, salt, len(tokens)) == len(tokens)
    assert len(encodings) == len(encodings._lengths) == len(tree._roots) == 10
    tree.flush()
    assert encodings._sizes == encodings._lengths == tree._roots == tree.quotas._pages == tree.quotas._victims == {}
