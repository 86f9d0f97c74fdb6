"""`ramet profile --answers`: right answers of all document methods on a file of questions, by a small model."""

import gzip
import json
import shutil

import pytest

from loadgen.offline.profile.answers import AnswerProfiler
from loadgen.offline.profile.questions import AnsweredQuestion, draw, read_questions
from runtime.errors import ModelError
from runtime.features.chunks.documents.plan import DocumentPlanner
from runtime.features.chunks.documents.table import choose
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
    assert not out.with_name("fusion.json.partial").exists()
    planner = DocumentPlanner.load("none", model)
    rows = {(row.method, row.ratio): row for row in planner.table}
    assert len(rows) == 4 + 3
    assert all(low <= row.lost <= high for row in rows.values() for low, high in [row.lost_interval])
    printed = capsys.readouterr().out.splitlines()
    best = choose(planner.table)
    assert printed[-1].startswith("No method" if best is None else f"Use {best.method}")
    assert sum(line.startswith("prophetkv 0.3") for line in printed) == 1


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
