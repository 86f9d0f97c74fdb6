"""A step between its launch and its booking."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from runtime.request import Work
from runtime.sampler_state import SampledTokens


@dataclass(slots=True)
class InFlight:
    """A step between its launch and its booking.

    Attributes:
        work: the rows of each request.
        logit_rows: rows of the logits, by piece of work and row set.
        saved: saved hidden states, by piece of work and row set.
        logits: float32 [S, vocab], valid until the next step is launched.
        num_rows: number of rows of the step.
        started: time of the launch in seconds, `time.monotonic`.
        version: of the plan; 0: no other step has the same requests and rows.
        sampled: the chosen tokens; None: there are none, or they are chosen after the step before has been booked.
    """

    work: list[Work]
    logit_rows: list[list[slice]]
    saved: list[list[torch.Tensor | None]]
    logits: torch.Tensor
    num_rows: int
    started: float
    version: int
    sampled: SampledTokens | None = None

    @property
    def needs_output(self) -> bool:
        """Whether the tokens of the step before must be booked before those of this step are chosen."""
        return any([item.request.sampler.needs_output for item in self.work])

    @property
    def live(self) -> InFlight:
        """The same step without the requests that have ended."""
        at = [i for i, item in enumerate(self.work) if item.is_live]
        if len(at) == len(self.work):
            return self
        logit_rows, saved = [self.logit_rows[i] for i in at], [self.saved[i] for i in at]
        return replace(self, work=[self.work[i] for i in at], logit_rows=logit_rows, saved=saved, version=0)
