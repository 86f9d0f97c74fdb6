"""Sampling of many requests at once with FlashInfer's filters, which do not sort."""

from collections.abc import Callable, Sequence
from functools import cached_property
from types import ModuleType

import torch

from runtime.execution.flashinfer_package import load_flashinfer
from runtime.execution.transfers import upload
from runtime.params import SamplingParams
from runtime.sampling.filters import keep_typical
from runtime.sampling.sampler import Draw, Sampler, highest


def make_sampler(
    backend_name: str,
    vocab_size: int,
    device: torch.device,
    argmax: Callable[[torch.Tensor], torch.Tensor] | None,
    draw: Draw | None,
) -> Sampler:
    """The sampler for an executor's logits: batched if its attention backend is FlashInfer."""
    return (BatchedSampler if backend_name == "flashinfer" else Sampler)(vocab_size, device, argmax or highest, draw)


class BatchedSampler(Sampler):
    """A `Sampler` that filters for all requests without grammar, bias or penalties in a few kernels.

    It draws like `Sampler`: FlashInfer's samplers derive their noise from the row in the batch, so a seed would not
    reproduce its tokens.
    """

    @cached_property
    def _kernels(self) -> ModuleType:
        return load_flashinfer().sampling

    def filter(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        probs = (logits / self._column([p.divisor for p in params])).softmax(-1)
        vocab = probs.shape[-1]
        if any(0 < p.top_k < vocab for p in params):
            top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], dtype=torch.int32)
            probs = self._kernels.top_k_renorm_probs(probs, upload(top_k, logits.device))
        if any(p.top_p < 1 for p in params):
            probs = self._kernels.top_p_renorm_probs(probs, self._column([p.top_p for p in params])[:, 0])
        for row, p in enumerate(params):
            if p.typical_p < 1:
                probs[row] = keep_typical(probs[row], p.typical_p)
        if any(p.min_p > 0 for p in params):
            least = self._column([p.min_p for p in params]) * probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < least, 0)
        return probs
