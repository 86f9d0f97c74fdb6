"""Low-rank adaptation of every linear layer, with the base frozen and a mask embedding learned."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM


class LoraLlama(LlamaForCausalLM):
    """A Llama in which every row sees every row, with W + scale B A in place of every W of a layer.

    Only A, B and the mask's embedding have gradients. A and B are named as in an adapter's file.
    """

    mask_id: int

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> LoraLlama:
        """The base of a checkpoint directory. Raises OSError."""
        model: LoraLlama = cls.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
        model.config.is_causal = False  # for the mask; `is_causal=False` below is for the attention
        nn.Module.to(model.requires_grad_(False), device)
        return model

    def adapt(self, rank: int, alpha: float, mask_id: int, seed: int) -> None:
        """Begin at the base network: A random, B zero, the mask's embedding the mean of all."""
        generator = torch.Generator().manual_seed(seed)
        self.mask_id = mask_id
        for linear in [module for module in self.model.modules() if isinstance(module, nn.Linear)]:
            out, inner = linear.weight.shape
            a = torch.randn(rank, inner, generator=generator) * inner**-0.5
            linear.lora_A = nn.ParameterDict({"weight": a.to(self.device)})
            linear.lora_B = nn.ParameterDict({"weight": torch.zeros(out, rank, device=self.device)})
            linear.register_forward_hook(partial(_add_low_rank, alpha / rank))
        self.mask_embedding = nn.Parameter(self.model.embed_tokens.weight.float().mean(0))

    def hidden(self, tokens: Tensor, behind: DynamicCache | None = None) -> Tensor:
        """Hidden states [B, T, hidden] of token ids [B, T] after the last norm.

        `behind`: keys and values of the first rows, read in place of these rows, which are not in the result. Those of
        the others are added to it.
        """
        start = 0 if behind is None else behind.get_seq_length()
        rows = self.embedded(tokens[:, start:])
        states: Tensor = self.model(inputs_embeds=rows, past_key_values=behind, use_cache=False, is_causal=False)[0]
        return states

    def first_rows(self, tokens: Tensor, count: int) -> DynamicCache:
        """Keys and values of the first `count` rows in every layer, of token ids [B, T] that all see each other."""
        kept = DynamicCache()
        self.hidden(tokens, kept)
        kept.crop(count - tokens.shape[1])
        return kept

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, T, hidden], the mask's own among them."""
        rows = self.model.embed_tokens(tokens)
        return torch.where((tokens == self.mask_id)[..., None], self.mask_embedding.to(rows.dtype), rows)

    def learned(self) -> dict[str, nn.Parameter]:
        """Parameters with gradients, by the names in an adapter's file."""
        return {name: tensor for name, tensor in self.named_parameters() if tensor.requires_grad}

    def take(self, path: Path) -> dict[str, str]:
        """The factors and the mask's embedding of an adapter file in place of its own; returns the file's metadata."""
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata()
            with torch.no_grad():
                for name, tensor in self.learned().items():
                    tensor.copy_(file.get_tensor(name))
        return about

    def adapter(self) -> dict[str, Tensor]:
        """The tensors of an adapter file, in bfloat16 on the CPU."""
        tensors = self.learned().items()
        return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors}


def _add_low_rank(scale: float, linear: Any, given: tuple[Tensor], product: Tensor) -> Tensor:
    # The two thin products: W + scale B A would be kept for the way back, and have a gradient as large as W.
    a, b = (factor.weight.to(product.dtype) for factor in (linear.lora_A, linear.lora_B))
    return product + scale * F.linear(F.linear(given[0], a), b)
