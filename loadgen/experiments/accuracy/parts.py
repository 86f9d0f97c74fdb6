"""Questions about texts in parts, made with a seed. The parts become the modules of a schema.

In the first three tasks, a part makes sense alone; in the others, only together with other parts.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from xml.sax.saxutils import escape

from loadgen.experiments.accuracy.vocabulary import word_list
from loadgen.http.prose import Prose


@dataclass(frozen=True, slots=True)
class Item:
    """A question about a text in parts.

    Attributes:
        head: the text before the parts, outside of modules.
        parts: for each part, the members of its union; the first member is imported.
        question: the user's message; head and parts are the system message. None: plain text, without a chat.
        lead: the beginning of the answer, which is given.
        answer: the right continuation, beginning with a space.
        pairs: pairs of part numbers, of which the second part refers to the first.
    """

    head: str
    parts: list[list[str]]
    question: str | None
    lead: str
    answer: str
    pairs: tuple[tuple[int, int], ...] = ()

    def schema(self) -> str:
        """The schema in PML. The imported modules are named m0, m1, ..."""
        content = escape(self.head) + "".join(_modules(number, texts) for number, texts in enumerate(self.parts))
        if self.question is not None:
            content = f"<system>{content}</system>"
        return f'<schema name="parts">{content}</schema>'

    def prompt(self) -> str:
        """The prompt in PML. A chat ends before the assistant's turn; plain text ends with the lead."""
        imports = "".join(f"<m{number}/>" for number in range(len(self.parts)))
        text = self.lead if self.question is None else self.question
        return f'<prompt schema="parts">{imports}{escape(text)}</prompt>'

    def is_right(self, text: str) -> bool:
        """Whether a text contains the right answer as whole words."""
        return re.search(rf"\b{re.escape(self.answer.strip())}\b", text) is not None


def _modules(number: int, texts: list[str]) -> str:
    names = [f"m{number}", *(f"m{number}-{other}" for other in range(1, len(texts)))]
    pairs = zip(names, texts, strict=True)
    modules = "".join(f'<module name="{name}">{escape(text)}</module>' for name, text in pairs)
    return modules if len(texts) == 1 else f"<union>{modules}</union>"


@cache
def _prose() -> Prose:
    return Prose(random.Random(0))


def filler(rng: random.Random, tokens: int) -> str:
    """Sentences of about `tokens` tokens."""
    return _prose().reseeded(rng.random()).text(tokens).rstrip(".,;:!?") + "."


def _table(rng: random.Random, size: int) -> dict[str, str]:
    """A dict of `size` keys with numbers of four digits."""
    return {key: "".join(rng.choices("0123456789", k=4)) for key in rng.sample(word_list(), size)}


def needle(rng: random.Random, tokens: tuple[int, int] = (24, 8), form: str = "\n\nDocument {number}: {text}") -> Item:
    """A number to find in one of four documents; `tokens`: tokens of prose before and behind it."""
    before, behind = tokens
    key, number = rng.choice(word_list()), "".join(rng.choices("0123456789", k=7))
    texts = [filler(rng, before) for _ in range(4)]
    texts[rng.randrange(4)] += f" One of the special magic numbers for {key} is: {number}. {filler(rng, behind)}"
    return Item(
        "A special magic number is hidden within the following documents. Make sure to memorize it.",
        [[form.format(number=i, text=text)] for i, text in enumerate(texts, 1)],
        f"What is the special magic number for {key} mentioned in the documents?",
        f"The special magic number for {key} mentioned in the documents is",
        f" {number}",
    )


def table(rng: random.Random, lines: int = 3, form: str = "\n{key}: {value}") -> Item:
    """A table of keys and values in four parts of `lines` lines each."""
    values = _table(rng, 4 * lines)
    parts = _parts([form.format(key=key, value=value) for key, value in values.items()], lines)
    return _look_up(rng.choice(list(values)), values, parts)


def _parts(lines: list[str], count: int) -> list[list[str]]:
    """Group lines into parts of `count`."""
    return [["".join(lines[i : i + count])] for i in range(0, len(lines), count)]


def _look_up(key: str, values: dict[str, str], parts: list[list[str]], pairs: tuple[tuple[int, int], ...] = ()) -> Item:
    head, question = "This is a table of keys and values.", f"What is the value of the key {key}?"
    return Item(head, parts, question, f"{key}:", f" {values[key]}", pairs)


# The question, the beginning of the sentence with the answer, and its possible ends.
_TRAITS = (
    ("What do you do for a living?", "I work as a", ("teacher", "farmer", "baker", "driver", "doctor", "soldier")),
    ("Which animal do you have?", "At home I keep a", ("dog", "cat", "rabbit", "snake", "turtle", "bird")),
    ("What do you drink in the morning?", "In the morning I drink", ("coffee", "tea", "milk", "juice", "water")),
    ("In which city do you live?", "I live in", ("Paris", "London", "Rome", "Tokyo", "Berlin", "Madrid")),
    ("Which instrument do you play?", "I play the", ("piano", "guitar", "drums", "flute", "violin")),
    ("What do you do on Sundays?", "On Sundays I go", ("swimming", "running", "cycling", "skiing", "hiking")),
)


def persona(rng: random.Random) -> Item:
    """A person made of one member of each of six unions. Other members are longer, so that gaps of positions remain."""
    drawn = [(question, says, rng.sample(ends, 3)) for question, says, ends in rng.sample(_TRAITS, len(_TRAITS))]
    parts = [[f" {says} {end}." + f" {filler(rng, 8)}" * bool(i) for i, end in enumerate(e)] for _, says, e in drawn]
    question, says, ends = rng.choice(drawn)
    return Item("You are the following person.", parts, question, says, f" {ends[0]}")


_NAMES = ("Tom", "Mary", "John", "Anna", "Peter", "Lucy", "Paul", "Emma", "George", "Alice", "James", "Laura")
_BY_TWO = ((0, 1), (2, 3), (4, 5), (6, 7))


def reference(rng: random.Random) -> Item:
    """Four times, a part names a person and the next part says what "this person" has."""
    things = [word for word in word_list() if word[0] not in "aeiou"]
    people = dict(zip(rng.sample(_NAMES, 4), rng.sample(things, 4), strict=True))
    parts = []
    for name, thing in people.items():
        parts += [[f" {filler(rng, 6)} The next person is {name}."], [f" This person has a {thing}."]]
    name = rng.choice(list(people))
    return Item(
        "Read about some people.", parts, f"What does {name} have?", f"{name} has a", f" {people[name]}", _BY_TWO
    )


def cut(rng: random.Random) -> Item:
    """A table cut into parts between a key and its value. The question asks for such a value."""
    values = _table(rng, 12)
    keys = list(values)
    parts = []
    for before, middle, after in zip(keys[::3], keys[1::3], keys[2::3], strict=True):
        parts += [[f"\n{before}: {values[before]}\n{middle}:"], [f" {values[middle]}\n{after}: {values[after]}"]]
    return _look_up(rng.choice(keys[1::3]), values, parts, _BY_TWO)


# Words of four kinds, one tuple for each kind.
_KINDS = (
    ("lion", "tiger", "horse", "wolf", "bear", "rabbit", "goat", "fox"),
    ("bread", "cheese", "butter", "rice", "soup", "cake", "honey", "egg"),
    ("shirt", "coat", "hat", "shoe", "sock", "belt", "glove", "scarf"),
    ("car", "bus", "train", "ship", "boat", "plane", "truck", "bicycle"),
)


def labels(
    rng: random.Random,
    lines: int = 3,
    form: str = "\n{word}: {colour}",
    lead: str = "\n{word}:",
    head: str = "Words and their labels.",
) -> Item:
    """Words of four kinds, labelled with a colour by kind. Asks for a new word's label; `lines`: words in a part."""
    colours = rng.sample(("red", "blue", "green", "white"), 4)
    drawn = [(rng.sample(kind, 7), colour) for kind, colour in zip(_KINDS, colours, strict=True)]
    shots = [form.format(word=word, colour=colour) for words, colour in drawn for word in words[1:]]
    rng.shuffle(shots)
    words, colour = rng.choice(drawn)
    return Item(head, _parts(shots, lines), None, lead.format(word=words[0]), f" {colour}")


TASKS: dict[str, Callable[[random.Random], Item]] = {
    task.__name__: task for task in (needle, table, persona, reference, cut, labels)
}
