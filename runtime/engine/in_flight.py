"""A step that was launched, and what it will have given once it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from runtime.batch import ForwardBatch
from runtime.engine.scheduler import Work
from runtime.errors import RametError
from runtime.execution.transfers import upload
from runtime.protocol import TokenLogprob
from runtime.request import Request
from runtime.sampling.sampled import Sampled


@dataclass(slots=True)
class Flight:
    """One step between its launch and its booking.

    Attributes:
        work: what it computes.
        batch: what the model was given.
        logits: float32 [S, vocab], valid until the next step is launched.
        started: engine clock, seconds.
        asking: whose next tokens were `sampled`, in that order; the host reads them once.
    """

    work: list[Work]
    batch: ForwardBatch
    logits: torch.Tensor
    started: float
    asking: list[Request] = field(default_factory=list)
    sampled: Sampled | None = None

    def tokens_of(self, requests: Sequence[Request]) -> torch.Tensor:
        """The tokens int64 [n] of some who asked, where they were chosen; 0 where there is none. Nothing waits."""
        assert self.sampled is not None
        tokens = self.sampled.tokens.clamp_min(0)
        if list(requests) == self.asking:
            return tokens
        places = {request: place for place, request in enumerate(self.asking)}
        index = torch.tensor([places[request] for request in requests], dtype=torch.int64)
        return tokens[upload(index, tokens.device)]

    def read(self) -> dict[Request, int | RametError]:
        """Wait for the step; everybody's next token, or why there is none."""
        return {} if self.sampled is None else dict(zip(self.asking, self.sampled.read(), strict=True))

    def logprobs(self) -> dict[Request, TokenLogprob]:
        """Log-probabilities of the tokens, of those who wanted any."""
        found = {} if self.sampled is None else self.sampled.logprobs()
        return {self.asking[place]: logprob for place, logprob in found.items()}
