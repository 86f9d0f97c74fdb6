"""A step between its launch and its booking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.errors import RametError
from runtime.execution.transfers import upload
from runtime.protocol import TokenLogprob
from runtime.request import Request, Work
from runtime.sampler_state import SampledTokens


@dataclass(slots=True)
class InFlight:
    """A launched step.

    Attributes:
        work: the rows of each request.
        places: rows of the logits, by piece of work and row set.
        saved: hidden states that row sets save, likewise.
        logits: float32 [S, vocab], valid until the next step is launched.
        num_rows: rows of the step.
        started: time of the launch, seconds.
        asking: requests in the order of the tokens `sampled` for them; one with a draft stands there for each of its
            rows.
        expected: by row, the token of a draft that the row before it has to have chosen; None: there is no such row.
    """

    work: list[Work]
    places: list[list[slice]]
    saved: list[list[torch.Tensor | None]]
    logits: torch.Tensor
    num_rows: int
    started: float
    asking: list[Request] = field(default_factory=list)
    sampled: SampledTokens | None = None
    expected: list[int | None] = field(default_factory=list)

    def catch_up(self) -> bool:
        """Take note that the step before has been read; whether any request of this one is still live."""
        for item in self.work:
            item.ahead = 0
        return any([item.is_live for item in self.work])

    def tokens_of(self, requests: Sequence[Request]) -> torch.Tensor:
        """Sampled tokens int64 [n] of some requests, on the device and without a wait; 0 in place of a failure."""
        assert self.sampled is not None
        tokens = self.sampled.tokens.clamp_min(0)
        if list(requests) == self.asking:
            return tokens
        places = {request: place for place, request in enumerate(self.asking)}
        index = torch.tensor([places[request] for request in requests], dtype=torch.int64)
        return tokens[upload(index, tokens.device)]

    def read(self) -> dict[Request, list[int] | RametError]:
        """Wait for the step; the next tokens of each asking request, or its error.

        There are several where a draft was right. Behind right ones an error is left to the next step.
        """
        found: dict[Request, list[int] | RametError] = {}
        if self.sampled is None:
            return found
        tokens: list[int] = []  # of the request whose rows come now; none once one of them is wrong
        for request, expected, token in zip(self.asking, self.expected, self.sampled.read(), strict=True):
            if expected is None:
                tokens = [] if isinstance(token, RametError) else [token]
                found[request] = token if isinstance(token, RametError) else tokens
            elif not tokens or tokens[-1] != expected or isinstance(token, RametError):
                tokens = []
            else:
                tokens.append(token)
        return found

    def logprobs(self) -> dict[Request, list[TokenLogprob]]:
        """Log-probabilities of the sampled tokens, for requests that want them; more than `read` has tokens."""
        found: dict[Request, list[TokenLogprob]] = {}
        for place, logprob in ({} if self.sampled is None else self.sampled.logprobs()).items():
            found.setdefault(self.asking[place], []).append(logprob)
        return found
