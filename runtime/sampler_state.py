"""The sampler's part of a request, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from runtime.errors import RametError
from runtime.params import SamplingParams
from runtime.protocol import TokenLogprob


class SampledTokens(Protocol):
    """Tokens chosen on the device, int64 [n], on their way to the host."""

    tokens: torch.Tensor

    def read(self) -> list[int | RametError]:
        """Wait for the tokens; an error in place of the token of a request that failed."""

    def logprobs(self) -> dict[int, TokenLogprob]:
        """Wait for the log-probabilities that requests asked for, by index."""


class OutputGrammar(Protocol):
    """The state of the grammar that an output follows."""

    @property
    def complete(self) -> bool:
        """Whether the output may end here, and cannot go on."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, with nothing changed, if it is forbidden."""

    def forbidden(self, vocab_size: int) -> np.ndarray | None:
        """bool [vocab_size], tokens that cannot follow; None where the output is free."""


@dataclass(slots=True, eq=False)
class SamplerState:
    """The sampler's part of a request.

    Attributes:
        params: as the request gives them.
        stop_ids: tokens that end the output.
        prompt_logprobs_from: the first prompt index whose log-probability is still to be reported; None: none is.
        grammar: the state of the grammar that the output follows; None: there is none, or it is still compiled.
        counts: int64 [vocab], how often each token was generated, on the device of the logits; only where a penalty
            needs them. None: to be made from the tokens.
        prompt_ids: int64 [n], the distinct tokens of the prompt, with `counts`.
    """

    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs_from: int | None = None
    grammar: OutputGrammar | None = None
    counts: torch.Tensor | None = None
    prompt_ids: torch.Tensor | None = None

    def stops_at(self, token: int, num_output: int) -> bool:
        """Whether a token ends the request as the last of `num_output` generated ones."""
        return token in self.stop_ids and num_output >= self.params.min_new_tokens


class StepResult(NamedTuple):
    """A step's results for a piece of work.

    Attributes:
        logits: float32 [S, vocab], of the step.
        places: the work's rows of them, by row set.
        tokens: that `Decoding.choose` chose, up to one that ends the request.
        logprobs: their log-probabilities, if the request wants any.
    """

    logits: torch.Tensor
    places: Sequence[slice]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
