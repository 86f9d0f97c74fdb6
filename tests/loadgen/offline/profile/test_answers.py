"""`ramet profile --answers`: right answers of all document methods on a file of questions, by a small model."""

import gzip
import json
import shutil

import pytest

from loadgen.offline.document_methods import METHODS, ways
from loadgen.offline.profile import answers
from loadgen.offline.profile.answers import AnswerProfiler
from loadgen.offline.profile.questions import AnsweredQuestion, draw, read_questions
from runtime.errors import ModelError
from runtime.features.chunks.documents.plan import DocumentPlanner
from runtime.features.chunks.documents.table import MeasuredMethod, choose
from server.cli import main

LINES = [
    {"question": f"what is {word}", "answers": [word], "ctxs": [{"title": word, "text": f"{word} is a thing. " * 9}]}
    for word in ("alpha", "beta", "gamma", "delta")
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_a_broken_run_goes_on_and_auto_reads_its_table(tiny_dir, questions, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    out, plot = model / "fusion.json", tmp_path / "plot.png"
    small = ["--samples", "2", "--documents", "3", "--output", "4", "--ratios", "30", "--dtype", "float32"]
    files = ["--answers", str(questions), "--out", str(out), "--plot", str(plot)]
    command = ["profile", "--model", str(model), *files, *small]
    measure, measured = AnswerProfiler._measure, []

    def broken(self, question, names):
        measured.append(question.question)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(self, question, names)

    monkeypatch.setattr(AnswerProfiler, "_measure", broken)
    assert main(command) != 0
    assert not out.exists()
    assert main(command) == 0
    assert len(measured) == 3, "a question was asked again"
    assert measured[1] == measured[2]
    assert plot.stat().st_size > 1000
    planner = DocumentPlanner.load("none", model)
    rows = {(row.method, row.ratio): row for row in planner.table}
    assert len(rows) == len(METHODS)
    assert all(low <= row.lost <= high for row in rows.values() for low, high in [row.lost_interval])
    printed = capsys.readouterr().out.splitlines()
    assert choose(planner.table) is None
    assert {row.questions for row in rows.values()} == {2}
    assert printed[-1].startswith("Too few questions: auto stays with full prefill. To know more takes about 28 ")
    assert printed[-1].endswith("more questions (--samples 30).")
    assert sum(line.startswith("prophetkv 0.3") for line in printed) == 1


def test_more_questions_and_methods_are_added_to_those_that_were_measured(tiny_dir, questions, tmp_path, monkeypatch):
    out = tmp_path / "table.json"
    options = ["--documents", "3", "--output", "4", "--ratios", "30", "--dtype", "float32"]
    command = ["profile", "--model", str(tiny_dir), "--answers", str(questions), "--out", str(out), *options]
    measure, measured = AnswerProfiler._measure, []

    def counting(self, question, names):
        measured.append((question.question, len(names)))
        return measure(self, question, names)

    monkeypatch.setattr(AnswerProfiler, "_measure", counting)
    assert main([*command, "--samples", "1", "--methods", "pie"]) == 0
    assert main([*command, "--samples", "2", "--methods", "pie", "legolink"]) == 0
    (first, both), (again, one), (second, three) = measured
    assert first == again != second
    assert (both, one, three) == (2, 1, 3), "full prefill and pie were measured again"
    assert [row["method"] for row in json.loads(out.read_text())["measured"]] == ["pie", "legolink"]
    questions.write_text(questions.read_text() + json.dumps(LINES[0]) + "\n")
    assert main([*command, "--samples", "1"]) == 1, "answers to other questions"


ROWS = {"pie": 0.1, "legolink": 0.2, "passages": 0.4}


@pytest.mark.parametrize(
    ("count", "right", "advice"),
    [
        (8, {}, "Too few questions: auto stays with full prefill. To know more takes about 22 more questions "
                "(--samples 30)."),
        (30, {}, "Use pie: it loses 0.0 points of right answers at 0.10 of full prefill's time."),
        (30, {"pie": 20, "legolink": 25, "passages": 25}, "No method keeps right answers within 2 points: "),
        (60, {"pie": 0, "legolink": 59}, "Use legolink 16: it loses 1.7 [0.0, 5.0] points of right answers at 0.20 of"),
        (30, {"pie": 28, "legolink": 28, "passages": 29}, "No method keeps"),
    ],
)  # fmt: skip
def test_the_advice_says_how_many_questions_are_missing(count, right, advice):
    """Of `count` questions, the first `right` ones are answered right; full prefill answers all."""
    asked = ways(["pie", "legolink", "passages"], [0.3], ["token"])
    found = {"full prefill": [{"right": True, "ttft": 1.0}] * count}
    for name, way in asked.items():
        number = right.get(way.method, count)
        found[name] = [{"right": i < number, "ttft": ROWS[way.method]} for i in range(count)]
    methods = [MeasuredMethod.model_validate(answers._row(way, name, found)) for name, way in asked.items()]
    assert answers._advice(methods, found).startswith(advice)


def test_a_cheaper_method_that_is_not_decided_is_named():
    asked = ways(["legolink", "passages"], [0.3], ["token"])
    full = [{"right": i >= 25, "ttft": 1.0} for i in range(100)]
    others = [{"right": not 25 <= i < 50, "ttft": 0.2} for i in range(100)]
    found = {"full prefill": full, "passages 0.3, tokens": full, "legolink 16": others}
    methods = [MeasuredMethod.model_validate(answers._row(way, name, found)) for name, way in asked.items()]
    said = answers._advice(methods, found)
    assert said.startswith("Use passages 0.3, tokens: ")
    assert " To know whether legolink 16 keeps as many takes about 70 more questions (--samples 170)." in said


def test_documents_of_others_are_mixed_in(questions):
    every = read_questions(questions)
    drawn = draw(every, 3, 4, seed=1)
    assert drawn == draw(every, 3, 4, seed=1)
    assert len(drawn) == 3
    for one in drawn:
        assert sorted(document.title for document in one.documents) == ["alpha", "beta", "delta", "gamma"]
    assert {one.question for one in draw(every, 9, 1, seed=1)} == {line["question"] for line in LINES}


@pytest.mark.parametrize(
    ("said", "is_right"),
    [("It was The Beatles!", True), ("the beatle", False), ("He saw a U.S. Navy ship", True), ("", False)],
)
def test_an_answer_is_right_by_its_words(said, is_right):
    question = AnsweredQuestion(question="who", answers=["Beatles", "US navy"], documents=["text"])
    assert question.is_right(said) is is_right


def test_files_may_be_compressed_and_documents_may_be_texts(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "q", "answers": ["a"], "documents": ["one", {"text": "two"}]}\n\n'))
    assert [document.text for document in read_questions(path)[0].documents] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: : Invalid JSON"),
        ('{"question": "q", "answers": []}', "line 1: answers: "),
        ('{"question": "q", "answers": ["a"], "documents": [{"title": "t"}]}', "line 1: documents.0.text: "),
        ("", "has no questions"),
    ],
)
def test_a_bad_file_is_one_line(line, words, tiny_dir, tmp_path, capsys):
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n")
    files = ["--answers", str(path), "--out", str(tmp_path / "t.json")]
    assert main(["profile", "--model", str(tiny_dir), *files]) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--answers", "q.jsonl", "--length", "9"], "argument --length: not with --answers"),
        (["--documents", "3"], "argument --documents: not with a depth table"),
        (["--fusion", "--output", "3"], "argument --output: not with --fusion"),
    ],
)
def test_an_option_of_another_table_is_one_line(options, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["profile", "--out", str(tmp_path / "t.json"), *options])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_compressed_file_that_was_cut_off_or_damaged(tmp_path):
    path, whole = tmp_path / "q.jsonl.gz", gzip.compress(json.dumps(LINES).encode())
    for damaged in (whole[:-9], whole[:12] + b"\xff" * 8 + whole[20:]):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match="cannot be read"):
            read_questions(path)
