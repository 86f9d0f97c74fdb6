"""Text of a wanted length in tokens: real sentences, and random ones from pairs of words."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from itertools import pairwise

Cost = Callable[[str], float]

# Of English prose with a byte-level BPE vocabulary; assumed until a server has been asked.
CHARS_PER_TOKEN = 4.2
_MOST_WORDS = 40


@cache
def corpus_sentences() -> tuple[tuple[str, ...], ...]:
    """The sentences of the package's texts, as words."""
    texts = sorted(
        (f.name, f.read_text("utf-8")) for f in files("loadgen.http.corpus").iterdir() if f.name.endswith(".txt")
    )
    paragraphs = [paragraph for _, text in texts for paragraph in text.split("\n\n")]
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?])[\"']?\s+", p.strip())]
    return tuple(tuple(sentence.split()) for sentence in sentences if sentence)


def vocabulary() -> list[str]:
    """All words of the texts, sorted."""
    return sorted({word for sentence in corpus_sentences() for word in sentence})


class Prose:
    """A source of text. The same seed gives the same text.

    Half of the sentences are real, half come from a Markov chain over their pairs of words, so that word frequencies
    are those of the language. Every text begins with a sentence of the chain, so that no two texts share a prefix.

    Args:
        rng: the random numbers.
        cost: tokens of a word with the space before it.
    """

    def __init__(self, rng: random.Random, cost: Cost | None = None):
        self._rng = rng
        self._cost = cost or _by_length
        self._following: dict[str, list[str]] = defaultdict(list)
        self._openings: list[str] = []
        for words in corpus_sentences():
            self._openings.append(words[0])
            for word, following in pairwise(words):
                self._following[word].append(following)

    def reseeded(self, *key: object) -> Prose:
        """This source with a seed made of `key` alone: the same key always gives the same text."""
        twin = object.__new__(Prose)
        twin.__dict__.update(self.__dict__)
        twin._rng = random.Random(repr(key))
        return twin

    def text(self, tokens: float) -> str:
        """Text of about `tokens` tokens, or of exactly as many where the cost of words is exact."""
        words: list[str] = []
        left = tokens
        while left > 0:
            for word in self._sentence(fresh=not words):
                # The word that crosses the end is taken if that comes nearer to it.
                if (cost := self._cost(word)) > 2 * left and words:
                    return " ".join(words)
                words.append(word)
                left -= cost
                if left <= 0:
                    break
        return " ".join(words)

    def _sentence(self, fresh: bool) -> tuple[str, ...]:
        if not fresh and self._rng.random() < 0.5:
            return self._rng.choice(corpus_sentences())
        words = [self._rng.choice(self._openings)]
        while len(words) < _MOST_WORDS and (choices := self._following.get(words[-1])):
            words.append(self._rng.choice(choices))
        return tuple(words)


def _by_length(word: str) -> float:
    return (len(word) + 1) / CHARS_PER_TOKEN
