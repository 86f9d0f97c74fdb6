"""Steps of a text, however its delimiters fall on tokens, and how alike they are."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime.reuse.reasoning.steps import Splitter, Step, similarity, threshold


def split(*texts: str) -> list[Step]:
    splitter = Splitter()
    return [step for token, text in enumerate(texts) if (step := splitter.push(token, text)) is not None]


def ranges(*texts: str) -> list[tuple[int, int]]:
    return [(step.start, step.end) for step in split(*texts)]


def step(*tokens: int, text: str = "text") -> Step:
    return Step(0, len(tokens), text, Counter(tokens))


@pytest.mark.parametrize("end", [(".\n\n",), (".", "\n\n"), (".\n", "\n"), (".", "\n", "\n"), (".\n\nSo",)])
def test_a_delimiter_spans_tokens(end):
    texts = ("One", " step", *end)
    assert ranges(*texts, " x", "\n", "y") == [(0, len(texts))]
    assert split(*texts)[0].text == "".join(texts)
    assert split(*texts)[0].counts == Counter(range(len(texts)))


def test_further_line_breaks_belong_to_the_next_step():
    assert ranges("a\n\n", "\n", "\n\n", "b", "\n\n") == [(0, 1), (1, 5)]
    assert ranges("\n\n", "a", "", "\n", "", "\n") == [(0, 6)]
    assert ranges("\n\na", "b\n", "\n") == [(0, 3)]
    assert ranges("a\n", " \n", "\n") == [(0, 3)]


def test_code_behind_a_blank_line_is_known_as_code():
    first, second, third = split("See:\n", "```py\n", "x = 1\n\n", "y = 2\n", "```\n\n", "So.\n\n")
    assert (first.fence, second.fence, third.fence) == ("", "```py", "")
    assert second.formal_text == "```py\ny = 2\n```\n\n"


def test_similarity_is_cosine_times_ratio_of_lengths():
    assert similarity(step(1, 2, 2), step(2, 1, 2)) == 1
    assert similarity(step(1, 2), step(3, 4)) == 0
    assert similarity(step(1, 2, 2), step(1)) == pytest.approx(1 / 5**0.5)
    assert similarity(step(1, text="four"), step(1, text="seven +")) == pytest.approx(4 / 7)
    assert similarity(step(), step(1)) == similarity(step(1, text=""), step(1, text="")) == 0


def test_the_threshold_falls_as_steps_repeat():
    assert threshold([], 0.9, 0.6) == 0.9
    assert threshold([0.0, 0.0], 0.9, 0.6) == 0.9
    assert threshold([1.0, 1.0], 0.9, 0.6) == pytest.approx(0.6)
    assert threshold([1.0, 0.0], 0.9, 0.6) == pytest.approx(0.75)
    assert threshold([1.0, 0.5], 1, 1) == 1
