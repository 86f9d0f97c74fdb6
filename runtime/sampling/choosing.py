"""The choice of tokens with torch: bias, penalties and masks, filters, drawing."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from runtime.execution.transfers import index_on, upload
from runtime.params import SamplingParams
from runtime.sampler_state import NO_TOKEN, Choice, Measured
from runtime.sampling.filters import filter_probs, has_filters
from runtime.sampling.logprobs import measure_logprobs

# Tokens in a block: `draw` first draws a block, then a token in it.
_BLOCK = 64
_LEAST_NOISE = 1e-30


class TorchChoosing:
    """Chooses tokens on any device; `choose` waits for none."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        best = logits.argmax(-1)
        # argmax treats NaN as the maximum, so the chosen logit shows whether the row has a NaN.
        return best.where(logits.gather(-1, best[:, None])[:, 0].isfinite(), NO_TOKEN)

    def choose(self, logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
        logits = logits[index_on([one.row for one in choices], logits.device)]
        sound = self.argmax(logits) != NO_TOKEN
        for row, one in zip(logits, choices, strict=True):
            adjust(row, one)
        tokens = self.argmax(logits)
        drawing = [(i, one.params, one.noise) for i, one in enumerate(choices) if one.noise is not None]
        if drawing:
            places, params, noise = zip(*drawing, strict=True)
            index = index_on(places, logits.device)
            tokens = tokens.index_copy(0, index, draw(self.filter(logits[index], params), torch.stack(noise)))
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


def noise_size(vocab_size: int) -> int:
    """Number of noise values that `draw` takes."""
    return -(-vocab_size // _BLOCK) + _BLOCK


def column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Float32 [n, 1] on a device."""
    return upload(torch.tensor(values, dtype=torch.float32), device)[:, None]


def adjust(logits: torch.Tensor, choice: Choice) -> None:
    """Apply bias, penalties and masks to logits [vocab], in place."""
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
    if choice.allowed is not None:
        forbidden = np.unpackbits(choice.allowed, bitorder="little", count=len(logits)) == 0
        logits.masked_fill_(upload(torch.from_numpy(forbidden), device), -math.inf)
    if choice.barred:
        logits.index_fill_(0, index_on(choice.barred, device), -math.inf)


def draw(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw tokens, int64 [n], with probabilities proportional to weights [n, vocab]; `NO_TOKEN` for NaN weights.

    The largest weight / noise wins (exponential races): first among the sums of blocks, then within the block. Unlike
    a search in cumulative sums, the result hardly depends on the rounding of other weights.

    Args:
        weights: not negative.
        noise: exponential noise [n, number of blocks + size of a block].
    """
    if more := -weights.shape[-1] % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, more))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    noise = noise.clamp_min(_LEAST_NOISE)  # 0 / 0 would win
    block = (blocks.sum(-1) / noise[:, :-_BLOCK]).argmax(-1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block]
    token = (inside / noise[:, -_BLOCK:]).argmax(-1)
    return (block * _BLOCK + token).where(inside.sum(-1).isfinite(), NO_TOKEN)
