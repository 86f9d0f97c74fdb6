"""Latent attention (DeepSeek-V2, section 2.1) over cached latent vectors.

A head's key is W_k c for the latent vector c of a token, beside a rotated key that all heads share; its value is W_v c.
So W_k is applied to the query, W_v to the sum over tokens, and all heads attend to the cached rows, which are keys and
values at once. Prompts take this form, too: expanding keys and values is cheaper for rows that are computed together,
but then the bits of a row's result would depend on their number.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from runtime.execution.mixers.mixer import KVMixer, LayerWeights, MixedRows
from runtime.execution.ops import Ops
from runtime.models.latent import LATENT_EPS, LatentSpec


@dataclass(slots=True)
class LatentAttention(KVMixer):
    """Latent attention of one layer.

    The dimensions of a row of the pool are in the order in which half-split RoPE turns those of the rotated key alone:
    first halves of the rotated key and of the latent vector, then second halves.

    Attributes:
        query_down, query_norm: [query_rank, hidden] and [query_rank]; None: queries are computed from the input.
        query: [heads * (plain + rotated), query_rank or hidden].
        row, row_norm: [rank + rotated, hidden] and [rank].
        absorb: [heads, rank, plain], W_k transposed.
        expand: [heads, value, row], W_v with zeros for the dimensions of the rotated key.
    """

    spec: LatentSpec
    ops: Ops
    place: int
    query_down: torch.Tensor | None
    query_norm: torch.Tensor | None
    query: torch.Tensor
    row: torch.Tensor
    row_norm: torch.Tensor
    absorb: torch.Tensor
    expand: torch.Tensor
    inputs: torch.Tensor | None = None
    inputs_bias: torch.Tensor | None = None

    @classmethod
    def take(cls, weights: LayerWeights, spec: LatentSpec, ops: Ops, place: int, heads: int) -> "LatentAttention":
        is_low = spec.query_rank > 0
        query = weights.must(f"self_attn.q_{'b_' if is_low else ''}proj.weight").unflatten(0, (heads, -1))
        row = weights.must("self_attn.kv_a_proj_with_mqa.weight")
        both = weights.must("self_attn.kv_b_proj.weight").unflatten(0, (heads, -1))
        if spec.interleaved:
            for part in (query, row[None]):
                turned = part[:, -spec.rotated :]
                turned.copy_(torch.cat((turned[:, ::2], turned[:, 1::2]), dim=1))
        key, value = both.split((spec.plain, spec.value), dim=1)
        return cls(
            spec,
            ops,
            place,
            query_down=weights.one("self_attn.q_a_proj.weight"),
            query_norm=weights.one("self_attn.q_a_layernorm.weight"),
            query=query.flatten(0, 1),
            row=row,
            row_norm=weights.must("self_attn.kv_a_layernorm.weight"),
            absorb=key.transpose(1, 2).contiguous(),
            expand=_in_order(value.new_zeros(heads, spec.value, spec.rotated), value),
        )

    def mix(self, x: torch.Tensor, rows: MixedRows) -> torch.Tensor:
        qk = self._queries_and_row(x)
        q, k = self.ops.rotate_qk(qk, qk.shape[1] - 1, rows.angles)
        attended = rows.attend.run(self.place, q, k, k)
        return torch.matmul(self.expand, attended.permute(1, 2, 0)).permute(2, 0, 1).flatten(1)

    def project(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        """Rotated queries and the row as key and value, float32 [n, heads + 2, row], of x [n, hidden]."""
        qk = self._queries_and_row(x)
        q, k = self.ops.rotate_qk(qk, qk.shape[1] - 1, angles)
        return torch.cat((q, k, k), dim=1).float()

    def _queries_and_row(self, x: torch.Tensor) -> torch.Tensor:
        """Queries for rows of the pool, and the row, not rotated, [T, heads + 1, row], of inputs [T, hidden]."""
        spec, low = self.spec, x
        if self.query_down is not None and self.query_norm is not None:
            low = self.ops.rms_norm(F.linear(x, self.query_down), self.query_norm, LATENT_EPS)
        queries = F.linear(low, self.query).unflatten(1, (-1, spec.plain + spec.rotated)) * spec.factor
        plain, turned = queries.split((spec.plain, spec.rotated), dim=2)
        absorbed = torch.matmul(self.absorb, plain.permute(1, 2, 0)).permute(2, 0, 1)
        latent, key = F.linear(x, self.row).split((spec.rank, spec.rotated), dim=1)
        latent = self.ops.rms_norm(latent, self.row_norm, LATENT_EPS)
        return _in_order(torch.cat((turned, key[:, None]), dim=1), torch.cat((absorbed, latent[:, None]), dim=1))


def _in_order(rotated: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """The last dimension of a row of the pool, from those of its parts."""
    halves = zip(rotated.chunk(2, dim=-1), latent.chunk(2, dim=-1), strict=True)
    return torch.cat([part for half in halves for part in half], dim=-1)
