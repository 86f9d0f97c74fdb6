"""Fast-dLLM (Wu et al., 2025): parallel decoding by confidence, and KV kept between denoising steps."""

from typing import Literal

import torch


def by_threshold(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """Indices of the masks with a confidence, [n], of at least `threshold`, and always of the most confident mask."""
    accepted = confidence >= threshold
    accepted[confidence.argmax()] = True
    return accepted.nonzero()[:, 0]


def by_factor(confidence: torch.Tensor, factor: float) -> torch.Tensor:
    """Indices of the most confident masks: the n-th is accepted while its confidence >= 1 - factor / (n + 1).

    The most confident mask is always accepted.
    """
    values, order = confidence.sort(descending=True)
    short = values < 1 - factor / (torch.arange(len(values), device=values.device) + 2)
    short[0] = False
    accepted = int(short.nonzero()[0]) if bool(short.any()) else len(values)
    return order[:accepted]


def active_rows(
    cache: Literal["none", "prefix", "dual"], is_block_start: bool, block: range, shift: int, rows: range
) -> range:
    """Rows of a canvas that a denoising step computes; the KV of the others is kept.

    Args:
        cache: `prefix` computes the block and what follows it, `dual` the block alone, each after one full pass at the
            beginning of the block.
        is_block_start: whether this is the block's first step.
        block: the positions being denoised.
        shift: the logits of token i are read from row i - shift, so these rows come along.
        rows: all rows that may be computed.
    """
    if cache == "none" or is_block_start:
        return rows
    return range(max(block.start - shift, rows.start), rows.stop if cache == "prefix" else block.stop)
