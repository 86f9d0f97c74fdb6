"""Llama, Mistral, Qwen2, Qwen3, SmolLM2: one decoder, driven by a `ForwardBatch`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.attention.backend import AttentionBackend
from runtime.batch import ForwardBatch, LayerGroup
from runtime.kv.pool import KVPool
from runtime.models.ops import Ops, rotate
from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import ModelSpec


@dataclass(slots=True)
class Layer:
    """The weights of one decoder layer; q, k, v and gate, up are fused, as each pair reads the same input."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class LlamaModel:
    """The decoder stack and head over a paged pool."""

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor], device: torch.device, ops: Ops | None = None):
        """Take the tensors of `load_weights` out of `weights` (emptied, so that no copy stays).

        Args:
            spec: the model, or this rank's share of it.
            weights: as `load_weights` gives them.
            device: where they go.
            ops: what computes the small operations, and sums over the ranks.
        """
        self.spec = spec
        self.ops = ops or Ops()
        self.embedding = weights.pop("model.embed_tokens.weight").to(device)
        head = weights.pop("lm_head.weight", None)
        self.head = self.embedding if head is None else head.to(device)
        self.norm = weights.pop("model.norm.weight").to(device)
        self.rope = RotaryEmbedding(spec.rope, spec.head_dim, device)
        self.layers = [_take_layer(weights, f"model.layers.{i}.", device) for i in range(spec.num_layers)]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool, backend: AttentionBackend) -> torch.Tensor:
        """Run one step: writes the new K and V into `pool`, returns float32 logits [S, vocab] of `logits_rows`."""
        hidden = F.embedding(batch.tokens, self.embedding)
        for group in batch.groups:
            for given in group.load:
                hidden[given.rows] = given.states.to(hidden.dtype)
            if group.rows is None:
                hidden = self._run_group(group, hidden, batch.positions, pool, backend)
            else:
                alive = self._run_group(group, hidden[group.rows], batch.positions[group.rows], pool, backend)
                hidden = hidden.index_copy(0, group.rows, alive)
            for wanted in group.save:
                wanted.states.copy_(hidden[wanted.rows])
        hidden = self.ops.rms_norm(hidden[batch.logits_rows], self.norm, self.spec.rms_norm_eps)
        return self.ops.logits(hidden, self.head, self.spec.vocab_size)

    def _run_group(
        self,
        group: LayerGroup,
        x: torch.Tensor,
        positions: torch.Tensor,
        pool: KVPool,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        cos, sin = self.rope.cos_sin(positions)
        written = None if bool((group.kv_write >= 0).all()) else (group.kv_write >= 0).nonzero()[:, 0]
        slots = group.kv_write if written is None else group.kv_write[written]
        prepared = backend.prepare(group.attention)
        eps, ops = self.spec.rms_norm_eps, self.ops
        for index in group.layers:
            layer = self.layers[index]
            qk, v = self._qkv(layer, ops.rms_norm(x, layer.input_norm, eps))
            q, k = rotate(qk, cos, sin).split((self.spec.num_heads, self.spec.num_kv_heads), dim=1)
            if written is not None:
                k, v = k[written], v[written]
            pool.write(index, slots, k, v)
            x = ops.add_linear(x, backend.run(prepared, q, index).flatten(1), layer.o, layer.o_bias)
            gate_up = F.linear(ops.rms_norm(x, layer.post_norm, eps), layer.gate_up, layer.gate_up_bias)
            x = ops.add_linear(x, ops.silu_and_mul(gate_up), layer.down, layer.down_bias)
        return x

    def _qkv(self, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys side by side [T, heads + kv_heads, head_dim], as both are rotated next, and values."""
        spec = self.spec
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, spec.head_dim)
        qk, v = qkv.split((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self.ops.rms_norm(qk[:, : spec.num_heads], layer.q_norm, spec.rms_norm_eps)
            k = self.ops.rms_norm(qk[:, spec.num_heads :], layer.k_norm, spec.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        return qk, v


def _take_layer(weights: dict[str, torch.Tensor], prefix: str, device: torch.device) -> Layer:
    def one(name: str) -> torch.Tensor | None:
        tensor = weights.pop(prefix + name, None)
        return None if tensor is None else tensor.to(device)

    def must(name: str) -> torch.Tensor:
        return weights.pop(prefix + name).to(device)

    def fused(*names: str) -> torch.Tensor:
        return torch.cat([must(name) for name in names])

    def fused_bias(*names: str) -> torch.Tensor | None:
        return fused(*names) if prefix + names[0] in weights else None

    attention, mlp = "self_attn.", "mlp."
    return Layer(
        input_norm=must("input_layernorm.weight"),
        qkv=fused(*(f"{attention}{n}_proj.weight" for n in "qkv")),
        qkv_bias=fused_bias(*(f"{attention}{n}_proj.bias" for n in "qkv")),
        q_norm=one(attention + "q_norm.weight"),
        k_norm=one(attention + "k_norm.weight"),
        o=must(attention + "o_proj.weight"),
        o_bias=one(attention + "o_proj.bias"),
        post_norm=must("post_attention_layernorm.weight"),
        gate_up=fused(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        gate_up_bias=fused_bias(mlp + "gate_proj.bias", mlp + "up_proj.bias"),
        down=must(mlp + "down_proj.weight"),
        down_bias=one(mlp + "down_proj.bias"),
    )
