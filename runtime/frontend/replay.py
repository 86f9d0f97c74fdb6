"""Replay: where a prompt repeats an earlier answer's text, it gets the tokens that were sampled.

A model may sample tokens that are not the tokenizer's own for the same text. If the answer came back in other tokens,
its KV would not be found in the tree, and the model would read what it has not written.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from sys import getsizeof

from radix import Namespace
from runtime.frontend.account_cache import AccountCache
from runtime.models.tokenizer import Detokenizer, Tokenizer

TTL_S = 3600.0
# Most bytes of all accounts, and of one account. An answer counts as at least _LEAST bytes.
MOST, MOST_OF_ACCOUNT, _LEAST = 100 << 20, 25 << 20, 4 << 10
# Most tokens of answers that a look-up compares in vain.
_TRIED = 1 << 13


@dataclass(frozen=True, slots=True)
class EarlierAnswer:
    """An answer, behind its prompt.

    Attributes:
        prompt: text of the prompt.
        tokens, ends: int32, its tokens, and for each the number of characters up to its end.
        sampled: number of those tokens that were sampled as earlier answers.
        answer: int32, the answer's tokens.
    """

    prompt: str
    tokens: array[int]
    ends: array[int]
    sampled: int
    answer: array[int]

    @property
    def size(self) -> int:
        """Bytes, with the key of a `Replay`."""
        ids = sum(len(one) * one.itemsize for one in (self.tokens, self.ends, self.answer, self.answer))
        return max(getsizeof(self.prompt) + ids, _LEAST)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The beginning of a prompt, see `EarlierAnswer`."""

    tokens: array[int]
    ends: array[int]
    sampled: int

    @property
    def characters(self) -> int:
        return self.ends[-1] if self.ends else 0


NOTHING = Replayed(array("i"), array("i"), 0)


# Namespace, prompt, and the answer's tokens.
_Key = tuple[Namespace, str, bytes]


class Replay:
    """The recent answers of all accounts, by namespace; thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic):
        self._tokenizer = tokenizer
        self._said = AccountCache[_Key, EarlierAnswer](MOST, MOST_OF_ACCOUNT, TTL_S, lambda said: said.size, clock)

    def add(self, account: str, namespace: Namespace, said: EarlierAnswer) -> None:
        """Remember an answer."""
        self._said.add(account, (namespace, said.prompt, said.answer.tobytes()), said)

    def erase(self, account: str) -> None:
        """Forget the answers of an account."""
        self._said.erase(account)

    def find(self, account: str, namespace: Namespace, text: str) -> Replayed:
        """The longest beginning of a prompt's text that is a prompt and its answer in the namespace, or most of it."""
        kept = [
            said
            for (space, prompt, _), said in self._said.items(account)
            if space == namespace and text.startswith(prompt)
        ]
        left = _TRIED
        for said in sorted(kept, key=lambda one: len(one.prompt), reverse=True):
            if (found := self._match(said, text)) is not None:
                return found
            left -= len(said.answer)
            if left < 0:
                break
        return NOTHING

    def _match(self, said: EarlierAnswer, text: str) -> Replayed | None:
        """The prompt and as much of its answer as the text repeats, up to a place where no token of the rest reaches.

        Such a place is before or behind a token that the tokenizer cuts out of a text first, such as the end of a turn.
        """
        added, detokenizer, at = self._tokenizer.added_texts, Detokenizer(self._tokenizer, False), len(said.prompt)
        ends, counts = array("i"), list[int]()
        for token in said.answer:
            shown = detokenizer.push([token])
            if not text.startswith(shown, at):
                break
            at += len(shown)
            ends.append(at)
            if text.startswith(added, at) or self._tokenizer.token_text(token) in added:
                counts.append(len(ends))
        for count in reversed(counts):
            answer = said.answer[:count]
            if self._tokenizer.decode(answer.tolist(), False) == text[len(said.prompt) : ends[count - 1]]:
                return Replayed(said.tokens + answer, said.ends + ends[:count], said.sampled + count)
        return None
