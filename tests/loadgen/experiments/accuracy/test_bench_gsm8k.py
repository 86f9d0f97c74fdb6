"""GSM8K: numbers in answers, and sampled answers of a small model in a pool that holds a part of them."""

import json

import pytest

from loadgen.experiments.accuracy.bench_gsm8k import Exercise, last_number

LINES = [
    {"question": f"What is {n} plus 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"} for n in (4, 5)
]


@pytest.mark.parametrize(
    ("text", "number"),
    [("So 3 + 4 = 7.", 7), ("It costs $1,250.50.", 1250.5), ("\\boxed{-3}", -3), ("no number", None), ("", None)],
)
def test_the_last_number_is_the_answer(text, number):
    assert last_number(text) == number


def test_an_answer_is_right_by_its_last_number():
    exercise = Exercise.model_validate(LINES[0])
    assert exercise.is_right("4 + 1 = 5 apples")
    assert not exercise.is_right("5 apples, or 6")
    assert not exercise.is_right("")


def test_answers_are_sampled_with_and_without_shared_pages(measured, tiny_dir, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    small = ["--model", tiny_dir, "--engine", "dtype=float32", "--page-size", 4, "--output", 40, "--length", 40]
    small += ["--questions", 2, "--samples", 2, "--share", 0.6, "--percentiles", 100]
    found = measured("gsm8k", *small, "--data", path)
    assert [one["way"] for one in found] == ["exact", "percentile 100"]
    for one in found:
        assert one["right"] == [0, 0, 0, 0]
        assert len(one["tokens"]) == 4
        assert one["rate"] > 0
    assert found[0]["amsr"] == 0
