"""The tasks: right answers, shared prefixes, lengths as asked for, nothing twice by chance of a seed."""

import pytest

from loadgen.experiments.accuracy.measure import group_of
from loadgen.experiments.accuracy.tasks import TASKS, Examples
from loadgen.experiments.accuracy.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(default_model_dir):
    return Vocabulary(default_model_dir)


def texts(vocabulary, example):
    """The system message, the user's message and the answer, as words."""
    system = vocabulary.decode(example.prefix).removeprefix("system\n").removesuffix("user").strip()
    user = vocabulary.decode(example.suffix).removesuffix("assistant").strip()
    return system, user, vocabulary.decode(example.answer)


def solve_keep(system, user):
    removed = user.removeprefix("Remove: ").split()
    return " ".join(item for item in system.removeprefix("Items: ").split() if item not in removed)


def solve_lookup(system, user):
    pairs = dict(pair.split() for pair in system.removeprefix("Pairs: ").split(", "))
    return " ".join(pairs[key] for key in user.removeprefix("Values of: ").split())


NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def solve_arithmetic(system, user):
    prices = dict(pair.split() for pair in system.removeprefix("Prices: ").split(", "))
    numbers = []
    for word in user.removeprefix("Add: ").split():
        two = [NUMBERS.index(number) for number in numbers[-2:]]
        numbers.append(NUMBERS[sum(two)] if word == "sum" else prices[word])
    return " ".join(numbers)


def solve_choice(system, user):
    pairs = dict(pair.split() for pair in system.removeprefix("Pairs: ").split(", "))
    asked = user.removeprefix("A, B or C? ").split()
    found = []
    for key, *options in zip(*(asked[i::7] for i in range(7)), strict=True):
        letters = dict(zip(options[::2], options[1::2], strict=True))
        found.append(f"{pairs[key]} {letters[pairs[key]]} is the right answer.")
    return " ".join(found)


SOLVERS = {"keep": solve_keep, "lookup": solve_lookup, "arithmetic": solve_arithmetic, "choice": solve_choice}


@pytest.mark.parametrize("room", [16, 32, 64])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_answers_are_right_and_prefixes_shared(vocabulary, task, room):
    for number in range(5):
        group = Examples(vocabulary, 1).group(task, number, room, questions=3)
        assert group == Examples(vocabulary, 1).group(task, number, room, questions=3)
        assert group != Examples(vocabulary, 2).group(task, number, room, questions=3)
        assert len({tuple(example.prefix) for example in group}) == 1
        assert len({tuple(example.suffix) for example in group}) == 3
        for example in group:
            system, user, answer = texts(vocabulary, example)
            assert answer == SOLVERS[task](system, user)
            assert len(example.answer) == room
            assert example.answer[-1] == vocabulary.end
            # A server tokenizes the text as the training does.
            chat = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
            assert vocabulary.encode(chat.format(system, user)) == example.prefix + example.suffix


@pytest.mark.parametrize("ratio", [0.75, 0.9])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_prefixes_are_filled_to_the_ratio(vocabulary, task, ratio):
    example = group_of(Examples(vocabulary, 1), task, 0, 32, ratio, 2)[0]
    assert len(example.prefix) / len(example.ids) == pytest.approx(ratio, abs=0.01)
