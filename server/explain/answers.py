"""The prompts of recent answers by account, to compare later prompts with."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from cachetools import TTLCache

from radix import Namespace
from radix.node import TOKEN_BYTES
from runtime.frontend.output import PlacedPrompt, Submission

TTL_S = 3600.0
# Most tokens of all accounts and of one account. An answer counts as at least _LEAST tokens.
MOST_TOKENS, MOST_OF_ACCOUNT, _LEAST = 1 << 22, 1 << 20, 64
_PREFIX = re.compile(r"(chatcmpl-|cmpl-|resp_|msg_)")


@dataclass(frozen=True, slots=True)
class Asked:
    """An earlier answer's prompt: its int32 tokens, and the cache namespace of its request."""

    namespace: Namespace
    tokens: bytes

    @property
    def weight(self) -> int:
        return max(len(self.tokens) // TOKEN_BYTES, _LEAST)


class Answers:
    """Recent prompts. An account over its bound loses its own; over the common bound, the largest account loses some.

    An answer is found by its submission's id, with or without a route's prefix, and only within its account.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._by_account: dict[str, TTLCache[str, Asked]] = {}

    def find(self, account: str, answer: str) -> Asked | None:
        kept: Mapping[str, Asked] = self._by_account.get(account, {})
        return kept.get(answer) or kept.get(_PREFIX.sub("", answer, count=1))

    def add(self, submission: Submission, answer: str | None = None) -> None:
        """Remember a submission's prompt under the answer's id, unless the request forbids to store it."""
        reads_more = isinstance(submission.prompt, PlacedPrompt) and submission.prompt.ask is not None
        if reads_more or not submission.store:
            return
        account = submission.account
        if account not in self._by_account:
            self._by_account[account] = TTLCache(MOST_OF_ACCOUNT, TTL_S, self._clock, lambda asked: asked.weight)
        with suppress(ValueError):  # the prompt is larger than an account's bound
            self._by_account[account][answer or submission.rid] = Asked(submission.namespace, submission.tokens)
        while sum(kept.currsize for kept in self._by_account.values()) > MOST_TOKENS:
            max(self._by_account.values(), key=lambda kept: kept.currsize).popitem()

    def erase(self, account: str) -> None:
        """Forget all prompts of an account."""
        self._by_account.pop(account, None)
