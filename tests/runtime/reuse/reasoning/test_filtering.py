"""Candidate pages of steps, on a pool whose contents are drawn."""

from __future__ import annotations

from array import array

import pytest
import torch

from runtime.kv.pool import KVPool
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReasoningParams
from runtime.reuse.reasoning.distance import Distances
from runtime.reuse.reasoning.filtering import CollaborativeFilter, Match, StepHistory

ROWS = 4
WORDS = " we see that it is so and so it goes on and on in this way as long as it will"


@pytest.fixture(scope="module")
def tokenizer(tiny_dir) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


class Bench:
    """An output over a pool; `same` copies pages, by their places."""

    def __init__(self, tokenizer: Tokenizer, prompt: int = 4):
        torch.manual_seed(0)
        self.pool = KVPool(2, 64, ROWS, 2, 8, torch.float32, torch.device("cpu"))
        for tensor in (self.pool.k, self.pool.v):
            tensor.copy_(torch.randn(tensor.shape))
        self.tokenizer = tokenizer
        self.filter = CollaborativeFilter(Distances(self.pool), lambda: tokenizer, ROWS)
        self.prompt_len = prompt
        self.pages = array("i", range(63, 0, -1))
        self.begin()

    def begin(self) -> None:
        self.history = StepHistory(self.prompt_len, ReasoningParams())

    def same(self, place: int, other: int) -> None:
        mine, theirs = (slice(self.pages[at] * ROWS, (self.pages[at] + 1) * ROWS) for at in (place, other))
        for tensor in (self.pool.k, self.pool.v):
            tensor[:, mine] = tensor[:, theirs] + 1e-3

    def encode(self, text: str) -> array[int]:
        return array("i", self.tokenizer.encode(text, add_special_tokens=False))

    def run(self, text: str, first: int = 0) -> list[Match]:
        return self.filter.evaluate(self.history, self.pages, first, self.encode(text))


def test_a_page_is_compared_with_those_beside_its_place_in_the_step(tokenizer):
    bench = Bench(tokenizer)
    step = f"So{WORDS}.\n\n"
    length = len(bench.encode(step))
    assert length % ROWS == 0, "both steps begin at a page"
    places = length // ROWS
    for near in (-1, 0, 1):
        bench.same(1 + places + 2, 1 + 2 + near)
        bench.begin()
        assert bench.run(step) == []
        matches = bench.run(step)
        assert [match.index for match in matches] == list(range(1 + places, 1 + 2 * places))
        third = matches[2]
        assert third.source_index == 3 + near
        assert third.distance == min(match.distance for match in matches)
        assert (third.page, third.source_page) == (bench.pages[third.index], bench.pages[third.source_index])
        assert all(abs(m.index - places - m.source_index) <= 1 for m in matches)
    # Further away, it is not seen.
    bench.same(1 + places + 2, 1 + 4)
    bench.begin()
    bench.run(step)
    assert bench.run(step)[2].source_index != 5


def test_only_whole_pages_within_both_steps_count(tokenizer):
    bench = Bench(tokenizer, prompt=6)
    step = f"So{WORDS}.\n\n"
    length = len(bench.encode(step))
    bench.run(step)
    matches = bench.run(step)
    second = range(6 + length, 6 + 2 * length)
    assert matches
    for match in matches:
        assert match.index * ROWS in second
        assert (match.index + 1) * ROWS - 1 in second
        assert match.source_index * ROWS >= 6
        assert (match.source_index + 1) * ROWS <= 6 + length


def test_pages_of_the_tree_are_read_and_not_given_up(tokenizer):
    bench = Bench(tokenizer)
    step = f"So{WORDS}.\n\n"
    places = len(bench.encode(step)) // ROWS
    bench.run(step)
    first = 1 + places + 3
    matches = bench.run(step, first=first)
    assert {match.index for match in matches} == set(range(first, 1 + 2 * places))
    assert min(match.source_index for match in matches) < 1 + places


@pytest.mark.parametrize(
    ("first", "second", "is_candidate"),
    [
        (f"So{WORDS}.\n\n", f"So{WORDS}.\n\n", True),
        (f"So{WORDS}.\n\n", f"Yes{WORDS}!\n\n", True),
        (f"So{WORDS}.\n\n", "Nothing that was said before has anything to do with these other words here.\n\n", False),
        (f"So{WORDS}{WORDS}.\n\n", f"So{WORDS}.\n\n", False),
        (f"So 2x + 5{WORDS}.\n\n", f"So 2x + 5{WORDS}.\n\n", True),
        (f"So 2x + 5{WORDS}.\n\n", f"So 2x - 5{WORDS}.\n\n", False),
    ],
)
def test_both_filters_decide(tokenizer, first, second, is_candidate):
    bench = Bench(tokenizer)
    bench.run(first)
    assert bool(bench.run(second)) == is_candidate


def test_the_threshold_adapts_to_all_earlier_steps(tokenizer):
    """A step that is like half of another is none of its candidates, unless all steps before are like it."""
    half, whole = f"So{WORDS}.\n\n", f"So{WORDS} and so it goes on.\n\n"
    lenient, strict = Bench(tokenizer), Bench(tokenizer)
    for _ in range(3):
        lenient.run(half)
        strict.run("Other words altogether stand between these two here.\n\n" * 3)
    strict.run(half)
    assert lenient.run(whole)
    assert not strict.run(whole)


def test_steps_are_found_wherever_tokens_are_cut(tokenizer):
    text = f"So{WORDS}.\n\n" * 3
    whole, pieces = Bench(tokenizer), Bench(tokenizer)
    expected = [(m.index, m.source_index, m.distance) for m in whole.run(text)]
    assert expected
    tokens = whole.encode(text)
    found = []
    for at in range(0, len(tokens), 5):
        found += pieces.filter.evaluate(pieces.history, pieces.pages, 0, tokens[at : at + 5])
    assert [(m.index, m.source_index, m.distance) for m in found] == expected
