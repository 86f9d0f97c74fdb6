"""Prompts of recent answers, by account, for later comparisons."""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from radix import Namespace
from radix.node import TOKEN_BYTES, common_tokens
from runtime.frontend.output import Submission

TTL_S = 3600.0
# All accounts' tokens, and one account's; an answer counts for _LEAST tokens at least.
MOST_TOKENS, MOST_OF_ACCOUNT, _LEAST = 1 << 22, 1 << 20, 64
# Prompts with which a new one of the same namespace is compared, the places that are remembered, and how many of these
# must be the same.
_RECENT, _PLACES, _OFTEN = 8, 16, 4
# A prompt parts early if that is before its middle, and so many tokens before its end.
_EARLY = 128
# It goes on as the other one if one of its runs of _RUN tokens, so far behind the place, is there as well.
_RUN, _BEHIND = 16, (16, 32, 64, 96)
# Namespaces whose places are remembered.
_MOST_NAMESPACES = 1024
_PREFIX = re.compile(r"(chatcmpl-|cmpl-|resp_|msg_)")


@dataclass(frozen=True, slots=True)
class Asked:
    """An earlier answer's prompt: int32 tokens, and the namespace in which it was looked up."""

    namespace: Namespace
    tokens: bytes
    at_s: float

    @property
    def weight(self) -> int:
        return max(len(self.tokens) // TOKEN_BYTES, _LEAST)


@dataclass(frozen=True, slots=True)
class EarlyParting:
    """A place at which prompts of one namespace part again and again and go on alike behind it.

    `other`: int32, with which an earlier prompt goes on there.
    """

    token: int
    times: int
    new: bool
    other: bytes


class Answers:
    """Bounded by time and tokens; what one account sends displaces nothing of another's before all are full.

    An answer is found by its submission's id, with or without the prefix of a route. No account finds another's.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._by_account: dict[str, OrderedDict[str, Asked]] = {}
        self._weights: dict[str, int] = {}
        self._sweep_s = clock()
        self._places: OrderedDict[Namespace, deque[int]] = OrderedDict()

    def find(self, account: str, answer: str) -> Asked | None:
        kept: Mapping[str, Asked] = self._by_account.get(account, {})
        found = kept.get(answer) or kept.get(_PREFIX.sub("", answer, count=1))
        return None if found is None or found.at_s + TTL_S <= self._clock() else found

    def add(self, submission: Submission, answer: str | None = None) -> EarlyParting | None:
        """Remember a submission's prompt; its early parting from recent ones, if that has become a habit."""
        account, rid = submission.account, answer or submission.rid
        asked = Asked(submission.namespace, submission.tokens, self._clock())
        kept = self._by_account.setdefault(account, OrderedDict())
        recent = (other.tokens for other in reversed(kept.values()) if other.namespace == asked.namespace)
        parting = self._habit(asked, islice(recent, _RECENT))
        self._forget(account, rid)
        kept[rid] = asked
        self._weights[account] = self._weights.get(account, 0) + asked.weight
        while self._weights[account] > MOST_OF_ACCOUNT:
            self._forget(account, next(iter(kept)))
        while sum(self._weights.values()) > MOST_TOKENS:
            largest = max(self._weights, key=self._weights.__getitem__)
            self._forget(largest, next(iter(self._by_account[largest])))
        if asked.at_s >= self._sweep_s:
            self._sweep(asked.at_s)
        return parting

    def _sweep(self, now_s: float) -> None:
        """Forget what is too old."""
        self._sweep_s = now_s + TTL_S / 60
        for account, kept in self._by_account.items():
            for rid in [rid for rid, asked in kept.items() if asked.at_s + TTL_S <= now_s]:
                self._forget(account, rid)

    def _forget(self, account: str, rid: str) -> None:
        gone = self._by_account[account].pop(rid, None)
        if gone is not None:
            self._weights[account] -= gone.weight

    def _habit(self, asked: Asked, recent: Iterable[bytes]) -> EarlyParting | None:
        tokens, length = asked.tokens, len(asked.tokens) // TOKEN_BYTES
        other, token = b"", -1
        for earlier in recent:
            if (shared := common_tokens(tokens, 0, earlier)) > token:
                other, token = earlier[shared * TOKEN_BYTES :], shared
        if not other or 2 * token >= length or length - token < _EARLY or not _goes_on(tokens, token, other):
            return None
        places = self._places.setdefault(asked.namespace, deque(maxlen=_PLACES))
        self._places.move_to_end(asked.namespace)
        if len(self._places) > _MOST_NAMESPACES:
            self._places.popitem(last=False)
        places.append(token)
        times = places.count(token)
        return EarlyParting(token, times, times == _OFTEN, other) if times >= _OFTEN else None


def _goes_on(tokens: bytes, token: int, other: bytes) -> bool:
    """Whether a prompt, a little behind the place at which it parts from another one, is like that again."""
    for skipped in _BEHIND:
        start = (token + skipped) * TOKEN_BYTES
        run, at = tokens[start : start + _RUN * TOKEN_BYTES], -1
        while len(run) == _RUN * TOKEN_BYTES and (at := other.find(run, at + 1)) >= 0:
            if at % TOKEN_BYTES == 0:
                return True
    return False
