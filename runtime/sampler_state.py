"""The sampler's part of a request, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from runtime.errors import RametError
from runtime.params import SamplingParams
from runtime.protocol import TokenLogprob

if TYPE_CHECKING:
    from runtime.request import Request


class SampledTokens(Protocol):
    """Tokens of requests, chosen on the device, on their way to the host."""

    def on_device(self, requests: Sequence[Request]) -> torch.Tensor:
        """Tokens int64 [n] of some of the requests, without a wait; 0 in place of a failure."""

    def chosen(self) -> dict[Request, list[int] | RametError]:
        """Wait for the tokens; returns the next tokens of each request, or its error."""

    def logprobs(self) -> dict[Request, list[TokenLogprob]]:
        """Log-probabilities of the tokens, for requests that want them; with a draft, also those after `chosen`."""


class OutputGrammar(Protocol):
    """The state of the grammar that an output follows."""

    @property
    def complete(self) -> bool:
        """Whether the grammar is fulfilled and allows no further token."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, with nothing changed, if it is forbidden."""

    def forbidden(self, vocab_size: int) -> np.ndarray | None:
        """bool [vocab_size], tokens that cannot follow; None if the grammar allows every token."""


@dataclass(slots=True, eq=False)
class SamplerState:
    """The sampler's part of a request.

    Attributes:
        params: as the request gives them.
        stop_ids: tokens that end the output.
        prompt_logprobs_from: the first prompt index whose log-probability is still to be reported; None: none is.
        grammar: the state of the grammar that the output follows; None: there is none, or it is still compiled.
        counts: int64 [vocab], how often each token was generated, on the device of the logits. None: no penalty has
            needed it yet, or a failed step may have spoilt it.
        prompt_ids: int64 [n], the distinct tokens of the prompt, with `counts`.
    """

    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs_from: int | None = None
    grammar: OutputGrammar | None = None
    counts: torch.Tensor | None = None
    prompt_ids: torch.Tensor | None = None


class StepResult(NamedTuple):
    """A step's results for a piece of work.

    Attributes:
        logits: float32 [S, vocab], of the step.
        places: rows of `logits` that belong to the work, by row set.
        tokens: tokens that `Decoding.choose` chose, up to one that ends the request.
        logprobs: their log-probabilities, if the request wants any.
    """

    logits: torch.Tensor
    places: Sequence[slice]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
