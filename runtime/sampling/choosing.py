"""The choice of tokens with torch: bias, penalties and masks, filters, drawing."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from runtime.execution.transfers import index_on, upload
from runtime.params import SamplingParams
from runtime.sampler_state import NO_TOKEN, Measured, TokenChoice
from runtime.sampling.filters import filter_probs, has_filters
from runtime.sampling.logprobs import measure_logprobs

# Tokens in a block: `draw` first draws a block, then a token in it.
_BLOCK = 64

# Constants of SplitMix64 (Steele et al., 2014), as int64.
_STRIDE, _FIRST, _SECOND = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)


class TorchChoosing:
    """Chooses tokens on any device; `choose` waits for none."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        best = logits.argmax(-1)
        # argmax treats NaN as the maximum, so the chosen logit shows whether the row has a NaN.
        return best.where(logits.gather(-1, best[:, None])[:, 0].isfinite(), NO_TOKEN)

    def choose(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        logits = logits[index_on([one.row for one in choices], logits.device)]
        sound = self.argmax(logits) != NO_TOKEN
        for row, one in zip(logits, choices, strict=True):
            adjust(row, one)
        if any([one.allowed is not None for one in choices]):
            forbid(logits, [one.allowed for one in choices])
        tokens = self.argmax(logits)
        drawing = [(i, one.params, one.stream) for i, one in enumerate(choices) if one.stream is not None]
        if drawing:
            places, params, streams = zip(*drawing, strict=True)
            index, noisy = index_on(places, logits.device), index_on(streams, logits.device)
            tokens = tokens.index_copy(0, index, draw(self.filter(logits[index], params), noisy))
        return tokens.where(sound, NO_TOKEN)

    def measure(self, logits: torch.Tensor, rows: Sequence[int], tokens: torch.Tensor, top: int) -> Measured:
        if list(rows) != list(range(len(logits))):
            logits = logits[index_on(rows, logits.device)]
        return measure_logprobs(logits, tokens, top)

    def filter(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """The distributions [n, vocab] of n requests after temperature and filters; dropped tokens have 0."""
        probs = (logits / column([p.divisor for p in params], logits.device)).softmax(-1)
        for row, p in zip(probs, params, strict=True):
            if has_filters(p):
                row.copy_(filter_probs(row, p))
        return probs


def column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Float32 [n, 1] on a device."""
    return upload(torch.tensor(values, dtype=torch.float32), device)[:, None]


def adjust(logits: torch.Tensor, choice: TokenChoice) -> None:
    """Apply bias, penalties and barred tokens to logits [vocab], in place."""
    params, device = choice.params, logits.device
    if params.logit_bias:
        biases = upload(torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype), device)
        logits.index_add_(0, index_on(list(params.logit_bias), device), biases)
    if choice.seen is not None:
        counts = (choice.seen.counts - 1).clamp_min(0)
        if params.repetition_penalty != 1:
            scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(choice.seen.counts > 0, scaled, logits))
        logits -= params.frequency_penalty * counts
        logits -= params.presence_penalty * (counts > 0)
    if choice.barred:
        logits.index_fill_(0, index_on(choice.barred, device), -math.inf)


def forbid(logits: torch.Tensor, allowed: Sequence[np.ndarray | None]) -> None:
    """Forbid in each row of logits [n, vocab] what its bits do not allow, in place; None: every token is allowed."""
    vocab = logits.shape[-1]
    packed = np.full((len(allowed), -(-vocab // 8)), 255, dtype=np.uint8)
    for row, bits in zip(packed, allowed, strict=True):
        if bits is not None:
            row[:] = bits[: len(row)]
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits_set = upload(torch.from_numpy(packed), logits.device)[:, :, None] >> shifts & 1
    logits.masked_fill_(bits_set.flatten(1)[:, :vocab] == 0, -math.inf)


def draw(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Draw tokens, int64 [n], with probabilities proportional to weights [n, vocab]; `NO_TOKEN` for NaN weights.

    The largest weight / noise wins (exponential races): first among the sums of blocks, then within the block. Unlike
    a search in cumulative sums, the result hardly depends on the rounding of other weights.

    Args:
        weights: not negative.
        streams: int64 [n], random numbers that give the noise.
    """
    if more := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, more))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    noise = exponential(streams, blocks.shape[1] + _BLOCK)
    block = (blocks.sum(-1) / noise[:, :-_BLOCK]).argmax(-1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block]
    token = (inside / noise[:, -_BLOCK:]).argmax(-1)
    return (block * _BLOCK + token).where(inside.sum(-1).isfinite(), NO_TOKEN)


def exponential(streams: torch.Tensor, count: int) -> torch.Tensor:
    """Exponential noise, float64 [n, count], from streams int64 [n]: the same on every device."""
    z = streams[:, None] + torch.arange(1, count + 1, device=streams.device) * _STRIDE
    z = (z ^ _shift(z, 30)) * _FIRST
    z = (z ^ _shift(z, 27)) * _SECOND
    return -(-(_shift(z ^ _shift(z, 31), 12).double() + 0.5) * 2.0**-52).log1p()


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right of int64, as if it had no sign."""
    return z >> bits & (1 << 64 - bits) - 1
