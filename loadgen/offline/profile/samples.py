"""Sample requests for a profile: a shared prefix and prompts, cut to a ratio."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RULES = (
    "Answer in {n} sentences or fewer when the question is about {topic}.",
    "Never guess a number about {topic}; say that you do not know it.",
    "If the user writes about {topic}, mention source number {n} at the end.",
    "Use plain words for {topic} and explain each abbreviation once.",
    "Politely refuse to discuss {topic} with users younger than {n}.",
)
_QUESTIONS = (
    "A shop sells {topic} at {n} coins each. How much do {m} of them cost?",
    "Write a short story of {n} lines about {topic}, set in the year 19{m}.",
    "Why is {topic} important, and what would change without it? Give {n} reasons.",
    "Compare {topic} in two countries and sum it up in a table of {n} rows.",
    "I have read {m} pages about {topic} and still do not understand it. Can you help?",
)
_TOPICS = (
    *("bridges", "sleep", "rivers", "chess", "bread", "music", "taxes", "whales", "glass", "trains", "vaccines"),
    *("poetry", "volcanoes", "football", "soil", "satellites", "marriage", "clocks", "salt", "theatre", "bees"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The token ids of a request's shared prefix and prompt; `gen_length`: number of masks."""

    prefix: list[int]
    prompt: list[int]
    gen_length: int

    @property
    def length(self) -> int:
        """The number of positions: prefix, prompt and masks."""
        return len(self.prefix) + len(self.prompt) + self.gen_length


class Samples:
    """Samples by ratio and number. Equal arguments give equal samples.

    Args:
        encode: converts text to token ids.
        prefix: the shared prefix as text; empty: it is generated.
        prompts: users' prompts; empty: they are generated.
        length: number of positions: prefix, prompt and masks.
        gen_length: number of masks, but at most half of the positions that are not shared.
        seed: seed for the choice of prompts.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        prefix: str,
        prompts: Sequence[str],
        length: int,
        gen_length: int,
        seed: int,
    ):
        self._encode, self._length, self._gen_length, self._seed = encode, length, gen_length, seed
        self._prompts = list(prompts)
        self._prefix = encode(prefix) if prefix else []
        draw = random.Random(seed)
        while len(self._prefix) < length:
            self._prefix += encode(_fill(draw, _RULES) + "\n")

    def sample(self, ratio: int, number: int) -> Sample:
        """Sample `number`, of which `ratio` percent are shared, but at least two positions are not."""
        shared = min(max(round(self._length * ratio / 100), 1), self._length - 2)
        gen_length = max(min(self._gen_length, (self._length - shared) // 2), 1)
        wanted = self._length - shared - gen_length
        draw = random.Random(f"{self._seed}-{ratio}-{number}")
        return Sample(self._prefix[:shared], self._draw(draw, wanted), gen_length)

    def _draw(self, draw: random.Random, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            text = draw.choice(self._prompts) if self._prompts else _fill(draw, _QUESTIONS)
            found += self._encode(text + "\n")
        return found[:count]


def _fill(draw: random.Random, patterns: Sequence[str]) -> str:
    pattern = draw.choice(patterns)
    return pattern.format(topic=draw.choice(_TOPICS), n=draw.randrange(2, 10), m=draw.randrange(11, 99))
