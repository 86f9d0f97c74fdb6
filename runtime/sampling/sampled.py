"""Tokens that were chosen where the logits are, and that the host has not read yet."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.errors import RametError
from runtime.execution.transfers import Download
from runtime.protocol import TokenLogprob
from runtime.sampling.logprobs import Measured, list_logprobs

# Stands for a token where none could be chosen.
NO_TOKEN = -1


class BadLogits(RametError):
    """The model computed something that is no number."""

    def __init__(self) -> None:
        super().__init__("the model's logits for this request are not finite numbers")


class Sampled:
    """One token for each of n requests, on its way to the host from the moment on at which it was chosen.

    Attributes:
        tokens: int64 [n], where the logits are; `NO_TOKEN` for a request that cannot have one.
    """

    def __init__(
        self, tokens: torch.Tensor, failures: Mapping[int, RametError], tops: Mapping[int, int], measured: Measured
    ):
        """`failures`: why requests have none, if not for bad logits.

        `measured`: log-probabilities for the requests in `tops`, which says how many of the most likely each wants.
        """
        self.tokens = tokens
        self._failures, self._tops = failures, tops
        self._download = Download([tokens, *measured], tokens.device)

    def read(self) -> list[int | RametError]:
        """Wait for the tokens; for a request that cannot have one, why: it fails alone."""
        tokens = self._download.wait()[0].tolist()
        return [self._failures.get(i) or BadLogits() if t == NO_TOKEN else t for i, t in enumerate(tokens)]

    def logprobs(self) -> dict[int, TokenLogprob]:
        """Wait for the log-probabilities of those who wanted any, by their place among the requests."""
        if not self._tops:
            return {}
        tokens, *measured = self._download.wait()
        found = list_logprobs(tokens[list(self._tops)].tolist(), measured)
        for logprob, top in zip(found, self._tops.values(), strict=True):
            del logprob.top[top:]
        return dict(zip(self._tops, found, strict=True))
