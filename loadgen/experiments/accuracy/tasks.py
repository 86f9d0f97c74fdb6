"""Tasks, made with a seed, whose answers depend on the whole prefix: stale rows of the prefix give wrong answers.

Every example is a chat with a system message (the shared prefix) and a user message (the suffix).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from loadgen.experiments.accuracy.vocabulary import Vocabulary

_SYSTEM, _USER, _ASSISTANT = (
    "<|im_start|>system\n",
    "<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)


@dataclass(frozen=True, slots=True)
class Example:
    """The token ids of a request and its answer.

    Attributes:
        prefix: the system message.
        suffix: the user's message, up to the answer.
        answer: the right answer, padded with end-of-text tokens to the length of the canvas.
    """

    prefix: list[int]
    suffix: list[int]
    answer: list[int]

    @property
    def ids(self) -> list[int]:
        """Prefix, suffix and answer."""
        return self.prefix + self.suffix + self.answer


@dataclass(frozen=True, slots=True)
class Body:
    """The texts of a task: the end of the system message, and pairs of question and answer."""

    system: str
    turns: list[tuple[str, str]]


_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

Task = Callable[[random.Random, list[str], int, int], Body]


def keep(rng: random.Random, words: list[str], room: int, questions: int) -> Body:
    """Repeat a list in order, without the items that the user removes; `room`: tokens for the answer.

    All answers about one list have the same length.
    """
    kept = room - rng.randint(1, 3)
    removed = rng.randint(max(1, room // 8), max(2, room // 4))
    items = rng.sample(words, kept + removed)
    turns = []
    for _ in range(questions):
        out = rng.sample(items, removed)
        turns.append((f"Remove: {' '.join(out)}", "".join(f" {item}" for item in items if item not in set(out))))
    return Body(f"Items: {' '.join(items)}", turns)


def lookup(rng: random.Random, words: list[str], room: int, questions: int) -> Body:
    """Give the values of keys, in the order of the question."""
    asked = room - rng.randint(1, 3)
    values = _draw_pairs(rng, words, asked + rng.randint(1, 4))
    turns = []
    for _ in range(questions):
        keys = rng.sample(list(values), asked)
        turns.append((f"Values of: {' '.join(keys)}", "".join(f" {values[key]}" for key in keys)))
    return Body(f"Pairs: {_listed(values)}", turns)


def arithmetic(rng: random.Random, words: list[str], room: int, questions: int) -> Body:
    """Give the prices of pairs of articles, each pair followed by its sum, as words for one to nine.

    Question and answer have equally many words, so that each word of the answer is equally far from its question.
    """
    asked = (room - 1) // 3
    articles = rng.sample(words, 2 * (asked + rng.randint(1, 2)))
    prices = {word: rng.randint(1, 6 if i % 2 else 3) for i, word in enumerate(articles)}
    turns = []
    for _ in range(questions):
        cheap, dear = rng.sample(articles[::2], asked), rng.sample(articles[1::2], asked)
        pairs = [rng.sample(pair, 2) for pair in zip(cheap, dear, strict=True)]
        numbers = [(prices[a], prices[b], prices[a] + prices[b]) for a, b in pairs]
        answer = "".join(f" {_NUMBERS[n]}" for of_pair in numbers for n in of_pair)
        turns.append(("Add: " + " ".join(f"{a} {b} sum" for a, b in pairs), answer))
    listed = {word: _NUMBERS[prices[word]] for word in rng.sample(articles, len(articles))}
    return Body(f"Prices: {_listed(listed)}", turns)


def choice(rng: random.Random, words: list[str], room: int, questions: int) -> Body:
    """For each key with three choices, give the key's value and the letter of that choice.

    As in `arithmetic`, a question has as many tokens as its answer.
    """
    asked = (room - 1) // 7
    values = _draw_pairs(rng, words, 3 * asked + rng.randint(0, 2))
    turns = []
    for _ in range(questions):
        asks, answers = [], []
        keys = rng.sample(list(values), 3 * asked)
        for key, *others in zip(*(keys[i::3] for i in range(3)), strict=True):
            options = [values[key], *(values[other] for other in others)]
            rng.shuffle(options)
            letter = "ABC"[options.index(values[key])]
            asks.append(" ".join([key, *(f"{option} {name}" for option, name in zip(options, "ABC", strict=True))]))
            answers.append(f" {values[key]} {letter} is the right answer.")
        turns.append(("A, B or C? " + " ".join(asks), "".join(answers)))
    return Body(f"Pairs: {_listed(values)}", turns)


def _draw_pairs(rng: random.Random, words: list[str], count: int) -> dict[str, str]:
    drawn = rng.sample(words, 2 * count)
    return dict(zip(drawn[::2], drawn[1::2], strict=True))


def _listed(pairs: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in pairs.items())


TASKS: dict[str, Task] = {"keep": keep, "lookup": lookup, "arithmetic": arithmetic, "choice": choice}


class Examples:
    """Examples of the tasks. Equal seeds give equal examples."""

    def __init__(self, vocabulary: Vocabulary, seed: object):
        self._vocabulary = vocabulary
        self._seed = seed

    def group(self, task: str, number: int, room: int, questions: int = 1, prefix: int = 0) -> list[Example]:
        """Requests that share one prefix.

        Args:
            task: a name of `TASKS`.
            number: index of the group.
            room: number of tokens in the canvas.
            questions: number of requests.
            prefix: least number of tokens in the prefix, which is filled with prose.
        """
        vocabulary, key = self._vocabulary, (self._seed, task, number, room)
        rng = random.Random(repr(key))
        body = TASKS[task](rng, vocabulary.words, room, questions)
        start, own = vocabulary.encode(_SYSTEM), vocabulary.encode(f"{body.system}") + vocabulary.encode(_USER)
        fill = vocabulary.filler(max(0, prefix - len(start) - len(own)), key)
        shared = start + fill + own
        turns = ((vocabulary.encode(asked) + vocabulary.encode(_ASSISTANT), answer) for asked, answer in body.turns)
        return [Example(shared, suffix, self._canvas(answer, room)) for suffix, answer in turns]

    def _canvas(self, answer: str, room: int) -> list[int]:
        ids = self._vocabulary.encode(answer)
        if len(ids) >= room:
            raise ValueError(f"an answer of {len(ids)} tokens and its end do not fit into {room}")
        return ids + [self._vocabulary.end] * (room - len(ids))
