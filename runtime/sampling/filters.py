"""Filters of distributions: top-k, top-p, typical-p and min-p."""

import torch

from runtime.params import SamplingParams

# With more tokens than this, top-p first groups them by probability, so that it sorts one group only.
_MANY = 2048
_ONE = 2.0**52


def has_filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.typical_p < 1 or params.min_p > 0


def filter_probs(probs: torch.Tensor, params: SamplingParams, may_wait: bool = True) -> torch.Tensor:
    """A distribution [vocab] after top-k, then top-p, typical-p and min-p; dropped tokens have 0.

    `may_wait`: whether top-p may synchronise with the device. This makes it faster.
    """
    if 0 < params.top_k < len(probs):
        values, tokens = probs.topk(params.top_k)
        probs = torch.zeros_like(probs).scatter_(0, tokens, values)
        probs /= probs.sum()
    if params.top_p < 1:
        probs = keep_top(probs, params.top_p, may_wait)
    if params.typical_p < 1:
        probs = keep_typical(probs, params.typical_p)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(), 0)
    return probs


def keep_top(probs: torch.Tensor, mass: float, may_wait: bool) -> torch.Tensor:
    """Top-p: keep the fewest most likely tokens of a distribution [vocab] that reach `mass`; of equal ones, lower ids.

    `may_wait`: see `filter_probs`.
    """
    kept, rest = torch.zeros_like(probs), mass * _ONE
    if not may_wait:
        tokens = torch.arange(len(probs), device=probs.device)
    else:
        # Dropping tokens below half of the mean dropped probability leaves few tokens to sort.
        tokens = (probs > (1 - mass) / 2 / len(probs)).nonzero()[:, 0]
        if len(tokens) > _MANY:
            kept, tokens, rest = _split_top(probs, tokens, rest)
    values, order = probs[tokens].sort(descending=True, stable=True)
    parts = _whole(values)
    return kept.scatter_(0, tokens[order], values.masked_fill(parts.cumsum(0) - parts >= rest, 0))


def _split_top(probs: torch.Tensor, tokens: torch.Tensor, rest: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Split at the class of nearly equal probabilities in which `rest` is reached: kept tokens, class, its share."""
    bits = probs.view(torch.int32)
    classes = bits[tokens] >> 16  # exponent and 7 bits of the fraction, in the order of the numbers
    sums = torch.bincount(classes, _whole(probs[tokens]))
    above = sums.flip(0).cumsum(0).flip(0)
    edge = max(int((above >= rest).sum()) - 1, 0)
    kept = probs.where(bits >= (edge + 1) << 16, 0)
    return kept, tokens[(classes == edge).nonzero()[:, 0]], rest - float(above[edge] - sums[edge])


def _whole(probs: torch.Tensor) -> torch.Tensor:
    """Probabilities in units of 1 / `_ONE`, float64. Their sums are exact, so that the order does not matter."""
    return (probs.double() * _ONE).floor_()


def keep_typical(probs: torch.Tensor, mass: float) -> torch.Tensor:
    """Locally typical sampling (Meister et al., 2023): keep the tokens whose surprise is nearest to the entropy.

    Args:
        probs: [vocab]; dropped tokens have 0.
        mass: share of the sum of `probs` that the kept tokens reach.
    """
    probs = probs / probs.sum()
    surprise = -probs.log()  # infinite for dropped tokens, which come last
    entropy = (probs * surprise).nansum()
    tokens = (surprise - entropy).abs().argsort(stable=True)
    values = probs[tokens]
    return torch.zeros_like(probs).scatter_(0, tokens, values.masked_fill(values.cumsum(0) - values >= mass, 0))
