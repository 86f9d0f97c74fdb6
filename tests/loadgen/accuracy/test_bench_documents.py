"""The bench of documents on a small random model: ways that must agree, its questions, and its tables."""

from __future__ import annotations

import argparse
import json
import random

import pytest

from loadgen.accuracy import bench_documents
from loadgen.accuracy.bench_quality import FULL, compare
from loadgen.accuracy.documents import TASKS, tokenize, ways_of
from loadgen.accuracy.documents_report import costs_of, lost_share, sections
from loadgen.accuracy.forced import Ask, Asker
from loadgen.micro.documents import METHODS, ways
from runtime.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return Tokenizer.load(tiny_dir)


@pytest.fixture(scope="module")
def asker(tiny_dir):
    asker = Asker(tiny_dir, dtype="float32", pool_tokens=8192, debug_invariants=True)
    yield asker
    asker.close()


def draw(task, number):
    return TASKS[task](random.Random(f"{task} {number}"))


def test_all_rows_computed_again_are_full_prefill_and_none_are_pie(asker, tokenizer):
    every = ways(METHODS, [0, 1], ["page", "token"])
    items, figures = [draw("lookup", 0), draw("few-shot", 0)], {}
    compare(asker, tokenizer, items, [ways_of(tokenize(item, tokenizer), every) for item in items], figures)
    assert figures.keys() == {FULL, *every}
    for name, mine in figures.items():
        largest = max(max(values) for values in mine["kl"])
        if name.split()[-1] == "1" or " 1," in name:
            assert largest < 1e-6, name
            assert mine["nll"] == pytest.approx(figures[FULL]["nll"], abs=1e-4)
        elif " 0" in name:
            assert mine["kl"] == [pytest.approx(values, abs=1e-6) for values in figures["pie"]["kl"]], name
        elif name != FULL:
            assert largest > 1e-6, name


def test_rows_are_chosen_without_the_answer(asker, tokenizer):
    """Forced answers change neither the choice nor its place in the prompt."""
    prompt = tokenize(draw("needle", 0), tokenizer)
    ask = ways_of(prompt, ways(["a3"], [0.3], ["token"]))["a3 0.3, tokens"]
    (first,), (second,) = asker.forced([ask], [[5]]), asker.forced([ask], [[9, 7, 7]])
    assert (first[0] - second[0]).abs().max() < 1e-4
    (plain,) = asker.forced([Ask(ask.tokens)], [[9, 7, 7]])
    assert (plain - second).abs().max() > 1e-3


@pytest.mark.parametrize("task", TASKS)
def test_a_document_has_the_answer_once_and_all_are_seeded(task, tokenizer):
    drawn = [draw(task, number) for number in range(10)]
    assert drawn == [draw(task, number) for number in range(10)]
    for item in drawn:
        prompt = tokenize(item, tokenizer)
        texts = [tokenizer.decode(prompt.tokens[start:stop].tolist()) for start, stop in prompt.documents]
        assert texts == [part[0] for part in item.parts]
        assert len(texts) == 4
        assert tokenizer.decode(prompt.tokens.tolist()).endswith(item.lead)
        key = item.lead.split()[1 if task == "which document" else 0].rstrip(":")
        line = {
            "needle": f"is: {item.answer.strip()}.",
            "lookup": f"{key}:{item.answer}\n",
            "few-shot": f"Label:{item.answer}\n",
            "which document": f"Document{item.answer}: The {key} is here.",
        }[task]
        count = sum(text.count(line) for text in texts)
        assert count == (6 if task == "few-shot" else 1)


def test_it_measures_and_writes(tiny_dir, tmp_path):
    parser = argparse.ArgumentParser()
    bench_documents.add_arguments(parser)
    model = ["--model", str(tiny_dir), "--dtype", "float32", "--methods", "a3", "random", "pie"]
    small = ["--counts", "2", "3", "--at", "3", "--tokens", "40", "--system", "20", "--question", "9"]
    more = ["--ratios", "0.15", "--repeats", "2", "--clients", "2", "--requests", "2", "--output", "2"]
    times = ["--readers", "2", "--json", str(tmp_path / "times.json")]
    assert bench_documents.run(parser.parse_args([*model, *small, *more, *times])) == 0
    found = json.loads((tmp_path / "times.json").read_text())
    assert [len(ways) for ways in found["speed"].values()] == [2 + 3, 2 + 2 * 1 * 2 + 1]
    assert "quality" not in found
    files = {"--json": "d.json", "--markdown": "d.md", "--plot": "d.png"}
    written = [argument for option, name in files.items() for argument in (option, str(tmp_path / name))]
    quality = ["--no-speed", "--quality", "--items", "2", "--tasks", "lookup", "--ratios", "0.15"]
    assert "a3 0.15, tokens" in found["speed"]["3"]
    merged = ["--merge", str(tmp_path / "times.json"), "--json", str(tmp_path / "times.json")]
    assert bench_documents.run(parser.parse_args([*model, *quality, *merged])) == 0
    quality[quality.index("lookup")] = "few-shot"
    assert bench_documents.run(parser.parse_args([*model, *quality, *merged[:2], *written])) == 0
    both = json.loads((tmp_path / "d.json").read_text())
    assert both["speed"] == found["speed"]
    assert list(both["quality"]) == ["lookup", "few-shot"]
    for figures in both["quality"].values():
        assert [len(mine["nll"]) for mine in figures.values()] == [2] * (1 + 2 * 1 * 2 + 1)
    assert len(list(sections(both))) == 2 + 1 + 1 + 2
    assert "A3 beside" in (tmp_path / "d.md").read_text()
    assert "3 documents" in costs_of(both)[1]
    assert (tmp_path / "d.png").stat().st_size > 10_000
    del both["speed"]
    assert costs_of(both)[0]["pie"][0] < 0.5


def test_the_share_of_a_saving_that_is_lost():
    assert lost_share(0.2, 0.2) == 0
    assert lost_share(0.6, 0.2) == pytest.approx(0.5)
    assert lost_share(1, 0.2) == 1


def test_a_ratio_out_of_range_is_refused(capsys):
    parser = argparse.ArgumentParser()
    bench_documents.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--ratios", "0.1", "2"])
    assert "argument --ratios" in capsys.readouterr().err


def test_shares_of_the_questions_documents_are_at_least_a_page(tokenizer):
    """A method that chooses nothing is PIE, and is not compared."""
    parser = argparse.ArgumentParser()
    bench_documents.add_arguments(parser)
    grid = bench_documents._grid(parser.parse_args([]))
    assert {"a3 0.05, tokens", "a3 0.15", "legolink 16", "full-local"} < grid.keys()
    assert "a3 0.05" not in grid
    for task in TASKS:
        for number in range(10):
            documents = tokenize(draw(task, number), tokenizer).documents
            assert 0.15 * sum(stop - start for start, stop in documents) >= 16
