"""Gated delta nets (Yang et al., 2024)."""

import torch
import torch.nn.functional as F

from runtime.execution.mixers.delta_rule import DeltaRows, advance_chunks
from runtime.execution.mixers.mixer import LayerWeights, reorder
from runtime.execution.mixers.recurrent import Recurrent
from runtime.execution.mixers.state_plan import Chunks, StatePlan
from runtime.models.recurrence import DeltaSpec

_L2_EPS = 1e-6


class DeltaNet(Recurrent):
    """State S [k_dim, v_dim] of a head: S <- a S; S <- S + k (x) beta (v - k S); output q S.

    Attributes:
        inputs: rows of queries, keys, values, decays, betas and output gates.
        rate, dt_bias: float32 [v_heads, 1, 1], the logarithm of a is -rate * softplus(projection + dt_bias).
        norm: float32 [v_dim].
    """

    spec: DeltaSpec

    def __init__(self, spec: DeltaSpec, weights: LayerWeights, order: int, eps: float):
        super().__init__(spec, weights, order, "linear_attn.conv1d")
        prefix = "linear_attn."
        self.inputs = torch.cat(_take_inputs(spec, weights))
        self.rate = weights.must(f"{prefix}A_log").float().exp()[:, None, None]
        self.dt_bias = weights.must(f"{prefix}dt_bias").float()[:, None, None]
        self.norm = weights.must(f"{prefix}norm.weight").float()
        self.eps = eps

    def advance(self, given: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        mixed, gates = given.split((self.spec.channels, 2 * self.spec.v_heads), dim=1)
        tail, matrix = state
        return torch.stack([self._step(*row, matrix) for row in zip(self.convolve(mixed, tail), gates, strict=True)])

    def _step(self, mixed: torch.Tensor, gates: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """The output [v_heads * v_dim] of one token. Several at once would differ: torch rounds exp by its place."""
        spec, keys = self.spec, self.spec.k_heads * self.spec.k_dim
        q, k, v = F.silu(mixed).split((keys, keys, spec.v_heads * spec.v_dim))
        q, k, v = self._heads(q) * spec.k_dim**-0.5, self._heads(k), v.view(spec.v_heads, 1, spec.v_dim)
        a, b = gates.view(2, spec.v_heads, 1, 1)
        matrix *= (-self.rate * F.softplus(a + self.dt_bias)).exp()
        matrix += k * ((v - (matrix * k).sum(1, keepdim=True)) * b.sigmoid())
        return (matrix * q).sum(1).flatten()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised queries or keys for each head of values, [v_heads, k_dim, 1]."""
        spec, x = self.spec, x.view(self.spec.k_heads, -1, 1)
        x = x * torch.rsqrt((x * x).sum(1, keepdim=True) + _L2_EPS)
        each = spec.v_heads // spec.k_heads
        return x.repeat(each, 1, 1) if spec.tiled else x.repeat_interleave(each, dim=0)

    def advance_all(self, tape: torch.Tensor, plan: StatePlan, tensors: list[torch.Tensor]) -> torch.Tensor:
        mixed, gates = tape.split((self.spec.channels, 2 * self.spec.v_heads), dim=1)
        tails, matrices = tensors
        mixed, gates = F.silu(self.convolve_all(mixed, plan, tails)), gates[len(self.taps) - 1 :]
        outputs = [advance_chunks(self._chunked(mixed, gates, one), one, matrices) for one in plan.groups]
        return torch.cat([out.transpose(1, 2).flatten(0, 1).flatten(1) for out in outputs])[plan.outputs]

    def _chunked(self, mixed: torch.Tensor, gates: torch.Tensor, chunks: Chunks) -> DeltaRows:
        """Rows [n, channels] behind the convolution, and their gates [n, 2 * v_heads], in chunks."""
        spec, keys = self.spec, self.spec.k_heads * self.spec.k_dim
        parts = mixed[chunks.rows].masked_fill(chunks.padding[..., None], 0.0)
        q, k, v = parts.split((keys, keys, spec.v_heads * spec.v_dim), dim=2)
        a, b = gates[chunks.rows].transpose(1, 2).chunk(2, dim=1)
        log_decay = -self.rate[:, 0] * F.softplus(a + self.dt_bias[:, 0])
        return DeltaRows(
            self._by_head(q) * spec.k_dim**-0.5,
            self._by_head(k),
            v.unflatten(2, (spec.v_heads, -1)).transpose(1, 2),
            log_decay.masked_fill(chunks.padding[:, None], 0.0),
            b.sigmoid(),
        )

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """As `_heads`, [chunks, v_heads, length, k_dim] of [chunks, length, k_heads * k_dim]."""
        spec, x = self.spec, x.unflatten(2, (self.spec.k_heads, -1)).transpose(1, 2)
        x = x * torch.rsqrt((x * x).sum(3, keepdim=True) + _L2_EPS)
        each = spec.v_heads // spec.k_heads
        return x.repeat(1, each, 1, 1) if spec.tiled else x.repeat_interleave(each, dim=1)

    def finish(self, out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        heads = out.unflatten(1, (self.spec.v_heads, -1))
        normed = F.rms_norm(heads, self.norm.shape, self.norm, self.eps).flatten(1)
        return normed * F.silu(given[:, self.spec.record :])


def _take_inputs(spec: DeltaSpec, weights: LayerWeights) -> list[torch.Tensor]:
    """The projections of q, k, v; of the decay; of beta; of the output gate."""
    prefix, each = "linear_attn.in_proj_", spec.v_heads // spec.k_heads
    if spec.grouped:
        b, a = reorder(weights.must(f"{prefix}ba.weight"), spec.k_heads, each, each)
        if spec.separate:
            return [weights.must(f"{prefix}qkv.weight"), a, b, weights.must(f"{prefix}z.weight")]
        values = each * spec.v_dim
        q, k, v, z = reorder(weights.must(f"{prefix}qkvz.weight"), spec.k_heads, spec.k_dim, spec.k_dim, values, values)
        return [q, k, v, a, b, z]
    return [weights.must(f"{prefix}{name}.weight") for name in ("qkv", "a", "b", "z")]
