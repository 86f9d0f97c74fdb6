"""A step between its launch and its booking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.errors import RametError
from runtime.execution.transfers import upload
from runtime.protocol import TokenLogprob
from runtime.request import Request, Work
from runtime.sampling.sampler import Sampled


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
        asking: requests in the order of the tokens `sampled` for them.
    """

    work: list[Work]
    places: list[list[slice]]
    saved: list[list[torch.Tensor | None]]
    logits: torch.Tensor
    num_rows: int
    started: float
    asking: list[Request] = field(default_factory=list)
    sampled: Sampled | None = None

    def tokens_of(self, requests: Sequence[Request]) -> torch.Tensor:
        """Sampled tokens int64 [n] of some requests, on the device and without a wait; 0 in place of a failure."""
        assert self.sampled is not None
        tokens = self.sampled.tokens.clamp_min(0)
        if list(requests) == self.asking:
            return tokens
        places = {request: place for place, request in enumerate(self.asking)}
        index = torch.tensor([places[request] for request in requests], dtype=torch.int64)
        return tokens[upload(index, tokens.device)]

    def read(self) -> dict[Request, int | RametError]:
        """Wait for the step; the next token of each asking request, or its error."""
        return {} if self.sampled is None else dict(zip(self.asking, self.sampled.read(), strict=True))

    def logprobs(self) -> dict[Request, TokenLogprob]:
        """Log-probabilities of the sampled tokens, for requests that want them."""
        found = {} if self.sampled is None else self.sampled.logprobs()
        return {self.asking[place]: logprob for place, logprob in found.items()}
