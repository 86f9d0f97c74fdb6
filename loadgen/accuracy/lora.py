"""Low-rank adaptation of every linear layer, with the base frozen and a mask embedding learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from loadgen.accuracy.plain_llama import LINEARS, PlainLlama
from runtime.models.adapters.merge import MASK_EMBEDDING


class LoraLlama(PlainLlama):
    """`PlainLlama` with W + scale B A in place of every W; only A, B and the mask's embedding have gradients."""

    mask_id: int
    scale: float

    def adapt(self, rank: int, alpha: float, mask_id: int, seed: int) -> None:
        """Begin at the base network: A random, B zero, the mask's embedding the mean of all."""
        generator = torch.Generator().manual_seed(seed)
        self.mask_id, self.scale = mask_id, alpha / rank
        self.factors = nn.ParameterDict()
        for layer in range(self.spec.num_layers):
            for name in LINEARS:
                out, inner = self.weights[f"model.layers.{layer}.{name}.weight"].shape
                a = torch.randn(rank, inner, generator=generator) * inner**-0.5
                self.factors[_key(layer, name, "A")] = nn.Parameter(a.to(self.device))
                self.factors[_key(layer, name, "B")] = nn.Parameter(torch.zeros(out, rank, device=self.device))
        self.mask_embedding = nn.Parameter(self.embedding.float().mean(0))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, T, hidden], the mask's own among them."""
        masked = (tokens == self.mask_id)[..., None]
        return torch.where(masked, self.mask_embedding.to(self.embedding.dtype), super().embedded(tokens))

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        """One adapted product."""
        weight = self.weights[f"model.layers.{layer}.{name}.weight"]
        a, b = self.factors[_key(layer, name, "A")], self.factors[_key(layer, name, "B")]
        return _LoraLinear.apply(x, weight, a, b, self.scale)

    def take(self, path: Path) -> dict[str, str]:
        """The factors and the mask's embedding of an adapter file in place of its own; returns the file's metadata."""
        with safe_open(path, framework="pt") as file:
            tensors = {name.replace(".", ":"): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about: dict[str, str] = file.metadata()
        with torch.no_grad():
            self.mask_embedding.copy_(tensors.pop(MASK_EMBEDDING))
            for name, tensor in tensors.items():
                self.factors[name].copy_(tensor)
        return about

    def adapter(self) -> dict[str, Tensor]:
        """The tensors of an adapter file, by PEFT's names, in bfloat16 on the CPU."""
        tensors = {name.replace(":", "."): factor for name, factor in self.factors.items()}
        tensors[MASK_EMBEDDING] = self.mask_embedding
        return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _key(layer: int, name: str, factor: str) -> str:
    # A parameter's name may hold no dot.
    return f"model.layers.{layer}.{name}.lora_{factor}.weight".replace(".", ":")


class _LoraLinear(torch.autograd.Function):
    """x (W + scale B A)^T: the sum is made for the product alone, so that only W is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        adapted = weight + (scale * b @ a).to(weight.dtype)
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return torch.nn.functional.linear(x, adapted)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        dy, flat = gradients[0].flatten(0, -2), x.flatten(0, -2)
        thin = ctx.scale * (dy @ b.to(dy.dtype))
        dx = torch.addmm(dy @ weight, thin, a.to(dy.dtype)).view_as(x)
        db = ctx.scale * (dy.T @ (flat @ a.T.to(x.dtype))).to(b.dtype)
        return dx, None, (thin.T @ flat).to(a.dtype), db, None
