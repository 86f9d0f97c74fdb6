"""Questions about texts in parts: the answer is there, once, and where the task says."""

import random

import pytest

from loadgen.experiments.accuracy.parts import TASKS, Item
from runtime.frontend.schemas.schema import Schema


def items(task: str) -> list[Item]:
    return [TASKS[task](random.Random(f"{task} {number}")) for number in range(20)]


@pytest.mark.parametrize("task", TASKS)
def test_equal_seeds_give_equal_questions_and_others_differ(task):
    assert items(task) == items(task)
    assert len({item.schema() + item.prompt() for item in items(task)}) == 20


@pytest.mark.parametrize("task", TASKS)
def test_every_question_is_a_prompt_of_its_schema(task, tokenizer):
    for item in items(task):
        schema = Schema.read(item.schema(), tokenizer, 512)
        prompt = schema.compile(item.prompt())
        imported = [f"/m{number}" for number in range(len(item.parts))]
        assert [entry.name for entry in prompt.ask.entries] == ["/", *imported]
        assert (prompt.stop > prompt.length) == (task == "persona"), "only unions leave gaps"


@pytest.mark.parametrize(("task", "line"), [("needle", "{key} is: {answer}."), ("table", "\n{key}: {answer}")])
def test_one_part_has_the_answer(task, line):
    for item in items(task):
        key = item.lead.split()[-6] if task == "needle" else item.lead[:-1]
        wanted = line.format(key=key, answer=item.answer.strip())
        assert sum(wanted in part for (part,) in item.parts) == 1
        assert sum(part.count(item.answer.strip()) for (part,) in item.parts) == 1


def test_a_persona_has_the_trait_that_is_asked_for():
    for item in items("persona"):
        assert sum(f" {item.lead}{item.answer}." == part[0] for part in item.parts) == 1
        assert len(item.parts) == 6
        assert all(len(one) > len(part[0]) for part in item.parts for one in part[1:])


@pytest.mark.parametrize("task", ["reference", "cut"])
def test_one_pair_has_the_answer_and_no_part_has_it_alone(task):
    for item in items(task):
        key = item.lead.removesuffix(" has a").removesuffix(":")
        joined = [item.parts[a][0] + item.parts[b][0] for a, b in item.pairs]
        line = f"is {key}. This person has a{item.answer}." if task == "reference" else f"\n{key}:{item.answer}"
        assert sum(line in both for both in joined) == 1
        assert not any(key in part and item.answer in part for (part,) in item.parts)


def test_labels_of_new_words_can_be_told_from_those_of_their_kind():
    for item in items("labels"):
        lines = "".join(part for (part,) in item.parts).split()
        assert item.lead.strip() not in lines
        colours = lines[1::2]
        assert sorted(map(colours.count, set(colours))) == [6, 6, 6, 6]
        assert item.answer.strip() in colours


def test_an_answer_is_right_if_its_words_are_there():
    item = Item("", [["x"]], None, "I play the", " piano")
    assert item.is_right(" piano, and")
    assert item.is_right("the piano.")
    assert not item.is_right(" pianos")
    assert not item.is_right(" guitar")
