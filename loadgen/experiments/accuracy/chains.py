"""Long chains of thought, made from templates with random numbers or read from a file."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Chain:
    """A question and the reasoning that is forced as its answer.

    Attributes:
        question: the user's message.
        thought: the reasoning; a blank line follows each step.
        lead: the text between reasoning and answer; empty if there is no answer.
        answer: the number or word that the model's next text must contain.
    """

    question: str
    thought: str
    lead: str = ""
    answer: str = ""


_THINGS = ("lamps", "chairs", "carpets", "mirrors", "clocks", "shelves", "tables", "curtains", "pillows", "vases")
_AGAIN = (
    "Wait, let me",
    "Hmm, I should",
    "To be sure, I",
    "Let me go back and",
    "Before I go on, I",
    "Actually, I will",
)

_SAYS = (
    "The shop sells {pieces} {thing} on this day, and each of them costs {price} dollars, "
    "so that together the {thing} bring in"
)
# Sentences that a chain has at most once.
_ASIDES = (
    "The question wants one number at the end, so the parts only have to be right and then be added.",
    "Nothing is said about taxes or discounts, and I take it that there are none.",
    "Another way is to think of a small shop first and to see whether the order of the sales could matter at all.",
    "It could not, because adding is the same from left to right and from right to left.",
    "A good habit is to guess the size of the result before computing it, as a slip of a digit would then stand out.",
    "My guess would be some thousands, certainly not millions, and not less than a few hundred either.",
    "If somebody had written the bill by hand, I would look for digits in the wrong column.",
    "The units agree, since every price is in dollars and every count is a plain number.",
    "I could also make a table with a row for every kind of goods, and sum its last column.",
    "That table would show nothing new, but it would be easier to read for whoever asks.",
    "What is still open is whether the sales of the morning belong to the same day.",
    "The text speaks of one day only, which settles this.",
    "One more doubt: are the pieces sold singly or in pairs? Each means singly, I believe.",
    "It is tempting to round the prices, yet the shop wants an exact sum.",
    "Let me think about the opposite question, how much each kind contributes as a share of everything.",
    "That is not asked, so I leave these percentages for another time.",
    "Multiplying is repeated adding, and doing it digit by digit keeps the carries visible.",
    "A calculator would do, but a second look by hand finds mistakes of another sort.",
    "Suppose one count were wrong by one: the total would then move by exactly one price.",
    "This tells me how sensitive the result is, and it is not very sensitive.",
    "I notice that no two kinds of goods are sold together, which keeps the cases apart.",
    "If there were bundles, the problem would need a system of equations.",
    "Reading the problem a third time, I find no hidden condition.",
    "So the plan stays what it was, and only the arithmetic is left.",
)


def worked(rng: random.Random, length: int) -> Chain:
    """A shop's takings, with a formula in each step. Later steps check earlier steps in similar words."""
    return _chain(rng, length, "{pieces} * {price} = ")


def alike(rng: random.Random, length: int) -> Chain:
    """As `worked`, but without formulas. Steps about different goods differ only in names and numbers."""
    return _chain(rng, length, "")


class _Goods(NamedTuple):
    thing: str
    pieces: int
    price: int

    def fill(self, text: str) -> str:
        return text.format(**self._asdict())

    @property
    def taken(self) -> int:
        return self.pieces * self.price


def _chain(rng: random.Random, length: int, formula: str) -> Chain:
    """A chain of about `length` tokens: a step for each kind of goods, then checks, with asides between."""
    goods = [_Goods(thing, rng.randint(11, 49), rng.randint(11, 89)) for thing in rng.sample(_THINGS, 5)]
    listed = ", ".join(one.fill("{pieces} {thing} for {price} dollars each") for one in goods)
    asides, order = iter(rng.sample(_ASIDES, len(_ASIDES))), iter(goods)
    steps: list[str] = []
    told: list[_Goods] = []
    tokens = 0
    while tokens < length:
        new = next(order, None)
        begin, one = ("Next I", new) if new else (rng.choice(_AGAIN), rng.choice(goods))
        said = one.fill(f"{begin} work out what the {{thing}} bring in. {_SAYS} {formula}") + f"{one.taken} dollars."
        more = [text for text in (said, " ".join(islice(asides, 2))) if text]
        steps += more
        told.append(one)
        tokens += sum(map(_about, more))
    asked = rng.choice(told)
    return Chain(
        f"On one day a shop sells {listed}. How much does it take in? Think step by step, and check every step.",
        "".join(f"{step}\n\n" for step in steps),
        "As I found above, the" + asked.fill(f"{_SAYS} {formula}").removeprefix("The").rstrip(),
        f"{asked.taken}",
    )


def _about(text: str) -> int:
    """The approximate number of tokens in a text: its words and its digits."""
    return len(text.split()) + sum(letter.isdigit() for letter in text)


def read_chains(path: Path) -> list[Chain]:
    """Recorded chains from JSON lines with `question` and `thought`, and optionally `lead` and `answer`.

    Raises:
        ValueError: if a line is not such an object.
    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found.append(Chain(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found


WRITTEN: dict[str, Callable[[random.Random, int], Chain]] = {"worked": worked, "alike": alike}
