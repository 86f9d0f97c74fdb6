"""Sampled tokens, between the device and the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.errors import RametError
from runtime.execution.transfers import Download
from runtime.protocol import TokenLogprob
from runtime.sampling.logprobs import Measured, list_logprobs

# In place of a token that could not be chosen.
NO_TOKEN = -1


class BadLogits(RametError):
    """A row of logits that is not finite."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not finite numbers")


class Sampled:
    """One token for each of n requests, with its transfer to the host.

    Attributes:
        tokens: int64 [n], on the device; `NO_TOKEN` for a request that failed.
    """

    def __init__(
        self, tokens: torch.Tensor, failures: Mapping[int, RametError], tops: Mapping[int, int], measured: Measured
    ):
        """Start the transfer.

        Args:
            tokens: int64 [n].
            failures: errors of requests without a token, except for bad logits.
            tops: number of alternatives, for requests that want log-probabilities.
            measured: log-probabilities of the requests in `tops`.
        """
        self.tokens = tokens
        self._failures, self._tops = failures, tops
        self._download = Download([tokens, *measured], tokens.device)

    def read(self) -> list[int | RametError]:
        """Wait for the tokens; an error in place of the token of a request that failed."""
        tokens = self._download.wait()[0].tolist()
        return [self._failures.get(i) or BadLogits() if t == NO_TOKEN else t for i, t in enumerate(tokens)]

    def logprobs(self) -> dict[int, TokenLogprob]:
        """Wait for the log-probabilities of the requests in `tops`, by index."""
        if not self._tops:
            return {}
        tokens, *measured = self._download.wait()
        found = list_logprobs(tokens[list(self._tops)].tolist(), measured)
        for logprob, top in zip(found, self._tops.values(), strict=True):
            del logprob.top[top:]
        return dict(zip(self._tops, found, strict=True))
