"""Filters of distributions: top-k, top-p and min-p."""

import torch

from runtime.params import SamplingParams

_ONE = 2.0**52


def has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def filter_probs(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """A distribution [vocab] after top-k, then top-p and min-p; dropped tokens have 0."""
    if 0 < params.top_k < len(probs):
        values, tokens = probs.topk(params.top_k)
        probs = torch.zeros_like(probs).scatter_(0, tokens, values)
        probs /= probs.sum()
    if params.top_p < 1:
        probs = keep_top(probs, params.top_p)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(), 0)
    return probs


def keep_top(probs: torch.Tensor, mass: float) -> torch.Tensor:
    """Top-p: keep the fewest likeliest tokens of a distribution [vocab] that reach `mass`; of equals, lower ids."""
    values, order = probs.sort(descending=True, stable=True)
    parts = _whole(values)
    return torch.zeros_like(probs).scatter_(0, order, values.masked_fill(parts.cumsum(0) - parts >= mass * _ONE, 0))


def _whole(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities in units of 1 / `_ONE`, float64. Their sums are exact, so that the order does not matter."""
    return (probs.double() * _ONE).floor_()
