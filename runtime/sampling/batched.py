"""Sampling of many requests at once with FlashInfer's filters, which do not sort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import ModuleType

import torch

from runtime.execution.flashinfer_package import load_flashinfer
from runtime.execution.transfers import upload
from runtime.request import Request
from runtime.sampling.sampler import Sampler, keep_typical, race


def make_sampler(
    backend_name: str, vocab_size: int, device: torch.device, argmax: Callable[[torch.Tensor], torch.Tensor]
) -> Sampler:
    """The sampler for an executor's logits: batched if its attention backend is FlashInfer."""
    return (BatchedSampler if backend_name == "flashinfer" else Sampler)(vocab_size, device, argmax)


class BatchedSampler(Sampler):
    """A `Sampler` that draws for all requests without grammar, bias or penalties in a few kernels.

    The noise of a request with a seed comes from its own stream: FlashInfer's samplers derive it from the row in the
    batch, so that a seed would not reproduce its tokens.
    """

    @cached_property
    def _kernels(self) -> ModuleType:
        return load_flashinfer().sampling

    def _draw_all(self, logits: torch.Tensor, requests: Sequence[Request], aheads: Sequence[int]) -> torch.Tensor:
        probs = self.filter(logits, requests)
        noise = torch.empty_like(probs).exponential_(generator=self._unseeded)
        for row, request, ahead in zip(noise, requests, aheads, strict=True):
            if request.sampling.seed is not None:
                row.exponential_(generator=self.generator(request, ahead))
        return race(probs, noise)

    def filter(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """`filter_probs` of n requests, up to rounding: [n, vocab] from float32 logits [n, vocab]."""
        params = [request.sampling for request in requests]
        probs = (logits / self._column([p.divisor for p in params])[:, None]).softmax(-1)
        vocab = probs.shape[-1]
        if any(0 < p.top_k < vocab for p in params):
            top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], dtype=torch.int32)
            probs = self._kernels.top_k_renorm_probs(probs, upload(top_k, logits.device))
        if any(p.top_p < 1 for p in params):
            probs = self._kernels.top_p_renorm_probs(probs, self._column([p.top_p for p in params]))
        for row, p in enumerate(params):
            if p.typical_p < 1:
                probs[row] = keep_typical(probs[row], p.typical_p)
        if any(p.min_p > 0 for p in params):
            least = self._column([p.min_p for p in params])[:, None] * probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < least, 0)
        return probs

    def _column(self, values: list[float]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.float32), self.device)
