"""Words of one token each, and the pieces of a chat prompt, as ids of the default tokenizer."""

import random
from functools import cache
from importlib.resources import files
from pathlib import Path

from loadgen.http.prose import Prose
from runtime.models.tokenizer import Tokenizer


@cache
def word_list() -> tuple[str, ...]:
    """Common nouns that are one token after a space."""
    return tuple((files("loadgen.experiments.accuracy") / "words.txt").read_text("utf-8").split())


class Vocabulary:
    """Converts text to ids, and provides words and prose.

    Args:
        directory: the model's directory, for its tokenizer. The chat pieces are ChatML, as in SmolLM2.
    """

    def __init__(self, directory: Path):
        self._tokenizer = Tokenizer.load(directory)
        self._line = self.encode("\n")
        self.end = self.encode("<|im_end|>")[0]
        self.words = [word for word in word_list() if len(self.encode(" " + word)) == 1]
        self._prose = Prose(random.Random(0))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, stripped and without special tokens."""
        return self._tokenizer.decode(ids).strip()

    def filler(self, tokens: int, *key: object) -> list[int]:
        """Exactly `tokens` ids of prose that end with a newline. Equal keys give equal ids."""
        if not tokens:
            return []
        ids = self.encode(self._prose.reseeded(*key).text(1.5 * tokens + 20))
        return ids[: tokens - 1] + self._line
