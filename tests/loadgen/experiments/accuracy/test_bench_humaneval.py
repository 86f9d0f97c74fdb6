"""HumanEval: programs in answers and their tests, and equal answers of a small model under all conditions."""

import gzip
import json

import pytest

from loadgen.experiments.accuracy.bench_humaneval import _CONDITIONS
from loadgen.experiments.accuracy.programs import Problem, read_problems
from loadgen.harness import BenchError

LINES = [
    {
        "task_id": f"Test/{number}",
        "prompt": f'def half(x):\n    return x / 2\n\n\ndef add{number}(x):\n    """Add {number}."""\n',
        "entry_point": f"add{number}",
        "test": f"def check(candidate):\n    assert candidate(2) == {2 + number}\n",
    }
    for number in range(3)
]


@pytest.mark.parametrize(
    ("answer", "solved"),
    [
        ("Here:\n```python\ndef add1(x):\n    return x + 1\n```\nIt adds.\n```python\n1 / 0\n```", True),
        ("```\ndef add1(x):\n    return 2 * half(x) + 1\n", True),
        ("def add1(x):\n    return x + 1", True),
        ("```python\ndef add1(x):\n    return x\n```", False),
        ("It adds.", False),
        ("", False),
        ("```python\nimport os\nos._exit(3)\n```", False),
    ],
)
def test_an_answer_is_right_if_its_program_passes_the_test(answer, solved):
    assert Problem.model_validate(LINES[1]).is_solved(answer) is solved


def test_an_endless_program_is_ended():
    endless = "```python\ndef add1(x):\n    while True:\n        pass\n```"
    assert not Problem.model_validate(LINES[1]).is_solved(endless, 0.3)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q"}\n')
    with pytest.raises(BenchError, match="is no file of HumanEval"):
        read_problems(path)


def test_answers_are_equal_under_all_conditions(measured, tiny_dir, tmp_path):
    path = tmp_path / "problems.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in LINES).encode()))
    small = ["--model", tiny_dir, "--engine", "dtype=float32", "page_size=4", "--output", 12, "--batch", 3]
    found = {one["condition"]: one for one in measured("humaneval", *small, "--data", path)}
    assert list(found) == list(_CONDITIONS)
    for one in found.values():
        assert one["differs"] == [0, 0, 0]
        assert one["right"] == [0, 0, 0]
    assert max(found["cold"]["cached"]) == 0 < min(found["warm"]["cached"])
    assert found["drafts"]["accepted"] >= 0
    assert found["from disk"]["loaded"] > 0
