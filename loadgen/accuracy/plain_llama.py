"""A plain Llama without a causal mask, for the training of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import LlamaSpec
from runtime.models.weights import load_weights

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


# Of some rows in a layer [B, kv_heads, T, head_dim] each.
KeysValues = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Rows:
    """Hidden states [B, T, hidden] and the cosines and sines [T, head_dim] of their positions."""

    x: Tensor
    cos: Tensor
    sin: Tensor


class PlainLlama(nn.Module):
    """The frozen network; a subclass may override `linear`.

    Args:
        spec: of the network.
        weights: by their names in a checkpoint.
        device: of weights and computation.
    """

    def __init__(self, spec: LlamaSpec, weights: dict[str, Tensor], device: torch.device):
        super().__init__()
        self.spec = spec
        self.device = device
        self.weights = {name: tensor.to(device) for name, tensor in weights.items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)
        self.rope = RotaryEmbedding(spec.rope, spec.head_dim, device)

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """Read a checkpoint directory, or the causal one that an adapter stands on. Raises ModelError."""
        spec = LlamaSpec.load(directory)
        return cls(spec, load_weights(directory, spec, dtype), device)

    def forward(self, tokens: Tensor, behind: list[KeysValues] | None = None) -> Tensor:
        """Hidden states [B, T, hidden] of token ids [B, T] after the last norm; every row sees every row.

        `behind`: keys and values of the first rows, read in place of these rows, which are not in the result.
        """
        start = 0 if behind is None else behind[0][0].shape[2]
        rows = self.embed(tokens[:, start:], start)
        for layer in range(self.spec.num_layers):
            k, v = self.keys_values(layer, rows)
            if behind is not None:
                k, v = torch.cat((behind[layer][0], k), 2), torch.cat((behind[layer][1], v), 2)
            rows.x = self.block(layer, rows, k, v)
        return self.normed(rows.x)

    def first_rows(self, tokens: Tensor, count: int) -> list[KeysValues]:
        """Keys and values of the first `count` rows in every layer, of token ids [B, T] that all see each other."""
        rows, kept = self.embed(tokens, 0), []
        for layer in range(self.spec.num_layers):
            k, v = self.keys_values(layer, rows)
            kept.append((k[:, :, :count], v[:, :, :count]))
            rows.x = self.block(layer, rows, k, v)
        return kept

    def embed(self, tokens: Tensor, start: int) -> Rows:
        """Rows of tokens [B, T] at positions from `start` on."""
        positions = torch.arange(start, start + tokens.shape[1], device=self.device)
        x = self.embedded(tokens)
        cos, sin = (torch.cat((half, half), -1).to(x.dtype) for half in self.rope.cos_sin(positions))
        return Rows(x, cos, sin)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, T, hidden]."""
        return F.embedding(tokens, self.embedding)

    def keys_values(self, layer: int, rows: Rows) -> KeysValues:
        """K (rotated) and V of the rows in a layer [B, kv_heads, T, head_dim]."""
        x = self._norm(rows.x, f"{layer}.input_layernorm")
        k, v = (self._heads(self.linear(x, layer, f"self_attn.{name}_proj")) for name in "kv")
        return _rotate(k, rows), v

    def block(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> Tensor:
        """The layer's output for the rows, which attend to all of `keys` and `values`."""
        x = self._norm(rows.x, f"{layer}.input_layernorm")
        q = _rotate(self._heads(self.linear(x, layer, "self_attn.q_proj")), rows)
        group = self.spec.num_heads // self.spec.num_kv_heads
        k, v = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = rows.x + self.linear(attended, layer, "self_attn.o_proj")
        y = self._norm(x, f"{layer}.post_attention_layernorm")
        inner = F.silu(self.linear(y, layer, "mlp.gate_proj")) * self.linear(y, layer, "mlp.up_proj")
        return x + self.linear(inner, layer, "mlp.down_proj")

    def linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        """One product of a layer."""
        return F.linear(x, self.weights[f"model.layers.{layer}.{name}.weight"])

    def normed(self, x: Tensor) -> Tensor:
        """The last norm."""
        return F.rms_norm(x, (x.shape[-1],), self.weights["model.norm.weight"], self.spec.rms_norm_eps)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[f"model.layers.{name}.weight"], self.spec.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)


def _rotate(x: Tensor, rows: Rows) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rows.cos + torch.cat((-second, first), -1) * rows.sin
