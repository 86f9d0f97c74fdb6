"""Text of a given length in tokens, from sentences of books and random sentences."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from itertools import pairwise

Cost = Callable[[str], float]

# The mean of English prose with a byte-level BPE vocabulary, if the server does not say.
CHARS_PER_TOKEN = 4.2
_MOST_WORDS = 40


@cache
def corpus_sentences() -> tuple[tuple[str, ...], ...]:
    """The sentences of the books in `corpus/`, as words."""
    texts = sorted(
        (f.name, f.read_text("utf-8")) for f in files("loadgen.http.corpus").iterdir() if f.name.endswith(".txt")
    )
    paragraphs = [paragraph for _, text in texts for paragraph in text.split("\n\n")]
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.!?])[\"']?\s+", p.strip())]
    return tuple(tuple(sentence.split()) for sentence in sentences if sentence)


def vocabulary() -> list[str]:
    """All words of the books, sorted."""
    return sorted({word for sentence in corpus_sentences() for word in sentence})


class Prose:
    """A source of text. The same seed gives the same text.

    Half of the sentences come from books. A Markov chain over the books' pairs of words makes the others, with natural
    word frequencies. Every text begins with a sentence of the chain, so that no two texts share a prefix.

    Args:
        rng: random numbers.
        cost: returns the number of tokens in a word and the space before it.
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
        """This source with a seed made of `key` alone: equal keys give equal texts."""
        twin = object.__new__(Prose)
        twin.__dict__.update(self.__dict__)
        twin._rng = random.Random(repr(key))
        return twin

    def text(self, tokens: float) -> str:
        """Text of about `tokens` tokens, or of exactly `tokens` if the costs of words are exact."""
        words: list[str] = []
        left = tokens
        while left > 0:
            for word in self._sentence(fresh=not words):
                # Take the word that crosses the end if this comes nearer to the wanted length.
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
