"""The choice of tokens with FlashInfer's filters, which do not sort."""

from collections.abc import Sequence
from functools import cached_property
from types import ModuleType

import torch

from runtime.execution.flashinfer_package import load_flashinfer
from runtime.execution.transfers import upload
from runtime.params import SamplingParams
from runtime.sampling.choosing import TorchChoosing, column


class FlashInferChoosing(TorchChoosing):
    """Filters for all requests in a few kernels.

    It draws like `TorchChoosing`: FlashInfer's samplers derive their noise from the row in the batch, so that a seed
    would not reproduce its tokens.
    """

    @cached_property
    def _kernels(self) -> ModuleType:
        return load_flashinfer().sampling

    def filter(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        probs = (logits / column([p.divisor for p in params], logits.device)).softmax(-1)
        vocab = probs.shape[-1]
        if any(0 < p.top_k < vocab for p in params):
            top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], dtype=torch.int32)
            probs = self._kernels.top_k_renorm_probs(probs, upload(top_k, logits.device))
        if any(p.top_p < 1 for p in params):
            top_p = column([p.top_p for p in params], logits.device)[:, 0]
            # Otherwise sums by atomic additions would let a seed draw other tokens from run to run.
            probs = self._kernels.top_p_renorm_probs(probs, top_p, is_deterministic=True)
        if any(p.min_p > 0 for p in params):
            least = column([p.min_p for p in params], logits.device) * probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < least, 0)
        return probs
