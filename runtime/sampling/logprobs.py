"""Log-probabilities under the model's own distribution, before any filter."""

from collections.abc import Sequence

import torch

from runtime.protocol import TokenLogprob
from runtime.sampler_state import Measured

_LEAST = -9999.0  # JSON has no infinity
# Rows measured at a time, so that their log-probabilities fit into a CPU's caches.
_ROWS = 32


def measure_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Measured:
    """Log-probabilities of tokens int64 [n] and of the `top` most likely ones, from float32 logits [n, vocab].

    The results stay on the device of the logits, and the call does not wait for it.
    """
    pieces = [_measure(*piece, top) for piece in zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)]
    return pieces[0] if len(pieces) == 1 else [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def _measure(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Measured:
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    return logprobs.gather(-1, tokens[:, None])[:, 0], ids, values


def list_logprobs(tokens: Sequence[int], measured: Measured) -> list[TokenLogprob]:
    """`TokenLogprob`s of n tokens. Waits for `measured` if it is on a GPU."""
    chosen, ids, values = measured
    likeliest = zip(ids.tolist(), values.clamp_min(_LEAST).tolist(), strict=True)
    tops = [list(zip(*top, strict=True)) for top in likeliest]
    return [TokenLogprob(*found) for found in zip(tokens, chosen.clamp_min(_LEAST).tolist(), tops, strict=True)]
