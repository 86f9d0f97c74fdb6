"""The bench of documents on a small random model: ways that must agree, and its questions."""

import random

import pytest

from loadgen.experiments.accuracy.documents import TASKS, tokenize
from loadgen.experiments.accuracy.quality import FULL, Judge
from loadgen.offline.document_methods import METHODS, ways
from loadgen.offline.forced import Ask
from runtime.features.chunks.ask import LED
from runtime.features.chunks.documents.plan import DocumentPlanner


def draw(task, number):
    return TASKS[task](random.Random(f"{task} {number}"))


def test_all_rows_computed_again_are_full_prefill_and_none_are_pie(asker, tokenizer):
    items, judge = [draw("lookup", 0), draw("few-shot", 0)], Judge(asker, tokenizer)
    prompts = [tokenize(item, tokenizer) for item in items]
    full = [Ask(prompt.tokens.tolist()) for prompt in prompts]
    figures = {FULL: judge.judge("both", items, full, None)}
    assert "kl" not in figures[FULL]
    for name, asked in ways(METHODS, [0, 1], ["page", "token"]).items():
        mine = [Ask(one.tokens.tolist(), DocumentPlanner().plan(one, asked).ask) for one in prompts]
        figures[name] = judge.judge("both", items, full, mine)
    for name, mine in figures.items():
        if name.split()[-1] == "1" or " 1," in name:
            assert max(mine["kl"]) < 1e-6, name
            assert mine["nll"] == pytest.approx(figures[FULL]["nll"], abs=1e-4)
        elif name.split()[0] in LED:  # reads documents that were encoded otherwise
            assert max(mine["kl"]) > 1e-6, name
        elif " 0" in name:
            assert mine["kl"] == pytest.approx(figures["pie"]["kl"], abs=1e-6), name
        elif name != FULL:
            assert max(mine["kl"]) > 1e-6, name


def test_rows_are_chosen_without_the_answer(asker, tokenizer):
    """Forced answers change neither the choice nor its place in the prompt."""
    prompt = tokenize(draw("needle", 0), tokenizer)
    asked = ways(["a3"], [0.3], ["token"])["a3 0.3, tokens"]
    ask = Ask(prompt.tokens.tolist(), DocumentPlanner().plan(prompt, asked).ask)
    (first,), (second,) = asker.forced([ask], [[5]]), asker.forced([ask], [[9, 7, 7]])
    assert (first[0] - second[0]).abs().max() < 1e-4
    (plain,) = asker.forced([Ask(ask.tokens)], [[9, 7, 7]])
    assert (plain - second).abs().max() > 1e-3


@pytest.mark.parametrize("task", TASKS)
def test_the_parts_of_a_question_are_documents_of_its_prompt(task, tokenizer):
    item = draw(task, 0)
    prompt = tokenize(item, tokenizer)
    texts = [tokenizer.decode(prompt.tokens[start:stop].tolist()) for start, stop in prompt.documents]
    assert texts == [part[0] for part in item.parts]
    assert len(texts) == 4
    assert item.is_right("".join(texts))
    assert tokenizer.decode(prompt.tokens.tolist()).endswith(item.lead)


def test_times_and_answers_are_measured(measured, tiny_dir):
    model = ["--model", tiny_dir, "--engine", "dtype=float32"]
    model += ["--methods", "a3", "pie", "--ratios", 0.05, 0.15]
    small = ["--counts", 2, 3, "--at", 3, "--tokens", 40, "--system", 20, "--question", 9]
    found = measured("documents", *model, *small, "--clients", 2, "--requests", 2, "--output", 2, "--readers", 2)
    few = ["full prefill", "prefix caching", "a3 0.15, tokens", "pie"]
    ways_of = [[one["way"] for one in found if one["work"].startswith(f"{count} documents")] for count in (2, 3)]
    assert ways_of[0] == few
    assert set(ways_of[1]) == {*few, "a3 0.05", "a3 0.15", "a3 0.05, tokens"}
    served = [one for one in found if "rate" in one]
    assert [one["way"] for one in served] == [way for way in few if way != "prefix caching"]
    assert all(one["pages"] >= one["more"] > 0 for one in served)
    found = measured("documents", *model, "--quality", "--tasks", "lookup")
    assert {one["way"] for one in found} == {*few, "a3 0.15", "a3 0.05, tokens"} - {"prefix caching"}
    assert all(len(one["nll"]) == len(one["right"]) == 8 for one in found)
