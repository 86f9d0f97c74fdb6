"""The prompts of recent answers by account, to compare later prompts with."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from radix import Namespace
from radix.node import TOKEN_BYTES
from runtime.frontend.account_cache import AccountCache
from runtime.frontend.output import Encoded

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
    """Recent prompts.

    An answer is found by its submission's id, with or without a route's prefix, and only within its account.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._asked = AccountCache[str, Asked](MOST_TOKENS, MOST_OF_ACCOUNT, TTL_S, lambda asked: asked.weight, clock)

    def find(self, account: str, answer: str) -> Asked | None:
        return self._asked.get(account, answer) or self._asked.get(account, _PREFIX.sub("", answer, count=1))

    def add(self, submission: Encoded, answer: str | None = None) -> None:
        """Remember a submission's prompt under the answer's id, unless the request forbids to store it."""
        reads_more = submission.parted is not None and submission.parted.ask is not None
        if reads_more or not submission.store:
            return
        asked = Asked(submission.namespace, submission.tokens)
        self._asked.add(submission.account, answer or submission.rid, asked)

    def erase(self, account: str) -> None:
        """Forget all prompts of an account."""
        self._asked.erase(account)
