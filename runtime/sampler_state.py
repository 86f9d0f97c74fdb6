"""The sampler's part of a request, and its results."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
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

    @property
    def changed(self) -> bool:
        """Whether `chosen` has given other tokens than `on_device`."""

    def on_device(self, requests: Sequence[Request]) -> torch.Tensor:
        """Tokens int64 [n] of some of the requests, without a wait; 0 in place of a failure."""

    def chosen(self) -> dict[Request, list[int] | RametError]:
        """Wait for the tokens, once; returns the next tokens of each request, or its error."""

    def logprobs(self) -> dict[Request, list[TokenLogprob]]:
        """Log-probabilities of the tokens, for requests that want them; with a draft, also those after `chosen`."""


# Placeholder for a token that could not be chosen.
NO_TOKEN = -1

# Log-probabilities of given tokens, float32 [n]; the likeliest tokens, int64 [n, top]; their values, float32 [n, top].
Measured = Sequence[torch.Tensor]


class OutputGrammar(Protocol):
    """The state of the grammar that an output follows."""

    @property
    def may_refuse(self) -> bool:
        """Whether `accept` may refuse a token that `allowed` allows."""

    @property
    def complete(self) -> bool:
        """Whether the grammar is fulfilled and allows no further token."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, with nothing changed, if it is forbidden."""

    def allowed(self) -> np.ndarray | None:
        """Bits in uint8, the lowest first: the tokens that can follow; None if the grammar allows every token."""


class Seen:
    """The tokens of a request's prompt and output, for penalties.

    Attributes:
        counts: int64 [vocab] on the device of the logits: 1 + how often a token was generated; 0: it is not seen.
        ids: the seen tokens, only on a CPU: a GPU's host may not have read the last token yet.
    """

    def __init__(self, counts: np.ndarray, on_device: torch.Tensor):
        """`counts` as above, and the same on the device, or the same memory."""
        self.ids = array("q", np.flatnonzero(counts).tobytes())
        self.counts = on_device
        self._host = counts if on_device.device.type == "cpu" else None

    @property
    def on_host(self) -> bool:
        return self._host is not None

    def add(self, token: int | torch.Tensor) -> None:
        """Count a generated token; a tensor [] only on a GPU, which is not waited for."""
        if self._host is None:
            at = max(token, 0) if isinstance(token, int) else token.clamp_min(0)[None]
            self.counts[at] = self.counts[at].clamp_min(1) + 1
            return
        value = max(int(token), 0)
        if not (count := self._host.item(value)):
            self.ids.append(value)
        self._host[value] = max(count, 1) + 1


@dataclass(slots=True)
class TokenChoice:
    """How to choose a token from a row of logits.

    Attributes:
        row: index of the row.
        stream: 63 bits that give the noise of a draw; None: take the highest logit.
        seen: of a request with penalties.
        allowed: see `OutputGrammar`.
        barred: tokens that may not follow either.
    """

    row: int
    params: SamplingParams
    stream: int | None = None
    seen: Seen | None = None
    allowed: np.ndarray | None = None
    barred: list[int] = field(default_factory=list)


class Choosing(Protocol):
    """Chooses tokens from float32 logits [n, vocab]: with torch, or by CPU kernels."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The tokens with the highest logits, int64 [n], the first of equal ones; `NO_TOKEN` if it is not finite."""

    def choose(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        """A token for each choice, int64; `NO_TOKEN` where the logits are not finite, or the choice leaves none."""

    def measure(self, logits: torch.Tensor, rows: Sequence[int], tokens: torch.Tensor, top: int) -> Measured:
        """Log-probabilities of a token for each of the rows, and of the `top` likeliest ones."""


@dataclass(slots=True, eq=False)
class SamplerState:
    """The sampler's part of a request.

    Attributes:
        params: as the request gives them.
        stop_ids: tokens that end the output.
        prompt_logprobs_from: the first prompt index whose log-probability is still to be reported; None: none is.
        grammar: the state of the grammar that the output follows; None: there is none, or it is still compiled.
        seen: the tokens so far. None: no penalty has needed them yet, or a failed step may have spoilt them.
    """

    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs_from: int | None = None
    grammar: OutputGrammar | None = None
    seen: Seen | None = None

    @property
    def needs_output(self) -> bool:
        """Whether the host must have read all tokens so far before the next one is chosen."""
        return self.params.constrained or bool(self.params.bad_words)


class StepResult(NamedTuple):
    """A step's results for a piece of work.

    Attributes:
        logits: float32 [S, vocab], of the step.
        logit_rows: rows of `logits` that belong to the work, by row set.
        tokens: tokens that `Decoding.choose` chose, up to one that ends the request.
        logprobs: their log-probabilities, if the request wants any.
    """

    logits: torch.Tensor
    logit_rows: Sequence[slice]
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
