"""Grammars advance by the tokens of a step when the host has read these."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.errors import RametError
from runtime.execution.transfers import index_on
from runtime.protocol import TokenLogprob
from runtime.request import Request
from runtime.sampler_state import NO_TOKEN, OutputGrammar, TokenChoice

if TYPE_CHECKING:
    from runtime.sampling.sampler import Sampler

log = logging.getLogger("ramet.engine")

# A token that is drawn again gets another random stream: the number of the try, shifted by this many bits, is added.
_TRIES = 40


class Follower(NamedTuple):
    """A request whose grammar is to accept a token.

    Attributes:
        at: index of the token among those that are chosen together.
        choice: how it is chosen.
        request, ahead: see `Sampler.sample`.
        grammar: the request's.
    """

    at: int
    choice: TokenChoice
    request: Request
    ahead: int
    grammar: OutputGrammar


class Followers:
    """Requests whose grammars accept or refuse their tokens, when the host has read these.

    Attributes:
        redrawn: indices of the tokens that a grammar has refused.
    """

    def __init__(
        self, sampler: Sampler, logits: torch.Tensor, followers: list[Follower], failures: dict[int, RametError]
    ):
        """Copy the logits of tokens that may be refused: the next step may overwrite them."""
        self._sampler, self._followers, self._failures = sampler, followers, failures
        self.redrawn: set[int] = set()
        refusing = [one for one in followers if one.grammar.may_refuse]
        self._kept_at = {one.at: row for row, one in enumerate(refusing)}
        self._kept = logits[index_on([one.choice.row for one in refusing], logits.device)] if refusing else None

    def advance(self, tokens: list[int]) -> None:
        """Advance by the tokens, and put others in the places of those that are refused; once only."""
        for one in self._followers:
            token, tokens[one.at] = tokens[one.at], NO_TOKEN
            with noting(one.request, one.choice.row, self._failures):
                tokens[one.at] = self._accepted(one, token)

    def _accepted(self, one: Follower, token: int) -> int:
        choice = one.choice
        for tries in count(1):
            if token == NO_TOKEN or one.grammar.accept(token):
                break
            assert self._kept is not None
            self.redrawn.add(one.at)
            choice = replace(choice, row=self._kept_at[one.at], barred=[*choice.barred, token])
            token = self._sampler.draw_again(self._kept, choice, one.request, one.ahead + (tries << _TRIES))
        if choice.seen is not None:
            choice.seen.add(token)
        return token

    def measured(self, at: int, token: int, top: int) -> TokenLogprob:
        """The log-probability of a redrawn token."""
        assert self._kept is not None
        (found,) = self._sampler.report_logprobs(self._kept[self._kept_at[at], None], [token], top)
        return found


@contextmanager
def noting(request: Request, row: int, failures: dict[int, RametError]) -> Iterator[None]:
    """A context in which an error fails one row."""
    try:
        yield
    except RametError as error:
        failures[row] = error
    except Exception as error:
        log.exception("no token could be chosen for request %s", request.rid)
        failures[row] = RametError(f"no token could be chosen: {type(error).__name__}")
