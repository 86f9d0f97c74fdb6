"""Attention with rotary embeddings over the paged pool."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from runtime.execution.adapters import add
from runtime.execution.mixers.mixer import KVMixer, LayerWeights, MixedRows, reorder
from runtime.execution.ops import Ops
from runtime.models.spec import DecoderSpec


@dataclass(slots=True)
class Attention(KVMixer):
    """Attention of one layer. q, k, v, and the gate if there is one, are fused, because they read the same input.

    `index`: of the layer.
    """

    spec: DecoderSpec
    ops: Ops
    index: int
    place: int
    inputs: torch.Tensor
    inputs_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None

    @classmethod
    def take(cls, weights: LayerWeights, spec: DecoderSpec, ops: Ops, index: int, place: int) -> "Attention":
        parts = ("qkv",) if spec.fused_qkv else tuple("qkv")
        if spec.gated:
            q, gate = reorder(weights.must("self_attn.q_proj.weight"), spec.num_heads, spec.head_dim, spec.head_dim)
            inputs = torch.cat((q, *(weights.must(f"self_attn.{n}_proj.weight") for n in "kv"), gate))
        else:
            inputs = weights.fused(*(f"self_attn.{n}_proj.weight" for n in parts))
        return cls(
            spec,
            ops,
            index,
            place,
            inputs=inputs,
            inputs_bias=weights.fused_bias(*(f"self_attn.{n}_proj.bias" for n in parts)),
            q_norm=weights.one("self_attn.q_norm.weight"),
            k_norm=weights.one("self_attn.k_norm.weight"),
            sinks=weights.one("self_attn.sinks"),
        )

    def mix(self, x: torch.Tensor, rows: MixedRows) -> torch.Tensor:
        qkv = F.linear(x, self.inputs, self.inputs_bias)
        add(rows.adapted, self.index, "qkv", qkv, x)
        qk, v = self._split(qkv)
        q, k = self.ops.rotate_qk(qk, self.spec.num_heads, rows.angles)
        attended = rows.attend.run(self.place, q, k, v).flatten(1)
        return attended * qkv[:, -attended.shape[1] :].sigmoid() if self.spec.gated else attended

    def project(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        qk, v = self._split(F.linear(x, self.inputs, self.inputs_bias))
        return torch.cat((*self.ops.rotate_qk(qk, self.spec.num_heads, angles), v), dim=1).float()

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys in one tensor [T, heads + kv_heads, head_dim], to be rotated together, and values."""
        spec = self.spec
        turned = spec.num_heads + spec.num_kv_heads
        qk, v, _ = qkv.view(len(qkv), -1, spec.head_dim).tensor_split((turned, turned + spec.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(qk[:, : spec.num_heads], self.q_norm, spec.rms_norm_eps)
            k = self.ops.rms_norm(qk[:, spec.num_heads :], self.k_norm, spec.rms_norm_eps)
            qk = torch.cat((q, k), dim=1)
        return qk, v
