"""Norms, rotation, activations and linear layers: in torch, as the reference, and with FlashInfer's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from runtime.models.rope import RotaryEmbedding, rotate

if TYPE_CHECKING:
    from runtime.execution.parallel.group import RankGroup


class Ops:
    """Operations in torch, on any device and in any dtype.

    Args:
        group: the ranks that share the weights; None: this process has all weights.
    """

    def __init__(self, group: RankGroup | None = None):
        self.group = group

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32; the result has x's dtype. `weight` may have another dtype."""
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_linear(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x + y @ weight^T (+ bias), summed over ranks, each of which has some columns of `weight`."""
        if self.group is not None:
            return self.group.sum(F.linear(y, weight, bias)).add_(x)
        if weight.is_quantized:  # it cannot be transposed
            return F.linear(y, weight, bias).add_(x)
        # The residual is added within the matrix product.
        out = torch.addmm(x, y, weight.t())
        return out if bias is None else out.add_(bias)

    def add_linear_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of `add_linear`, and its RMSNorm. May overwrite x."""
        x = self.add_linear(x, y, weight, bias)
        return x, self.rms_norm(x, norm, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up, [rows, n], of [rows, 2 * n] with the columns of gate before those of up."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """GELU(gate) * up with the tanh approximation; see `silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def angles(self, rope: RotaryEmbedding, positions: torch.Tensor) -> Any:
        """The argument `angles` of `rotate_qk` for int64 positions [rows] or [rows, 3]."""
        return rope.cos_sin(positions)

    def rotate_qk(self, qk: torch.Tensor, num_heads: int, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys of qk [rows, num_heads + kv_heads, head_dim]. May overwrite qk."""
        q, k = rotate(qk, *angles).split((num_heads, qk.shape[1] - num_heads), dim=1)
        return q, k

    def logits(self, x: torch.Tensor, head: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """x @ head^T, float32 [rows, vocab_size], gathered from the ranks, each of which has some rows of `head`."""
        if self.group is None:
            return F.linear(x, head).float()
        return self.group.side_by_side(F.linear(x, head))[:, :vocab_size].float()


class FlashInferOps(Ops):
    """Operations as one CUDA kernel each, in half precision."""

    def __init__(self, context_length: int, group: RankGroup | None = None):
        """`context_length`: all positions are below it."""
        from runtime.execution.flashinfer_package import load_flashinfer

        super().__init__(group)
        self.context_length = context_length
        self._flashinfer = load_flashinfer()
        self._cos_sin: torch.Tensor | None = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._flashinfer.rmsnorm(x, weight, eps)

    def add_linear_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.add_linear_norm`. Writes the sum into x."""
        product = F.linear(y, weight, bias)
        if self.group is not None:
            self.group.sum(product)
        self._flashinfer.fused_add_rmsnorm(product, x, norm, eps)
        return x, product

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._flashinfer.silu_and_mul(gate_up) if gate_up.numel() else gate_up

    def angles(self, rope: RotaryEmbedding, positions: torch.Tensor) -> Any:
        """The positions, and a table of cos and sin for every position, float32 [context, head_dim].

        For positions in three axes, cos and sin of each row, as in torch.
        """
        if positions.ndim == 2:
            return super().angles(rope, positions)
        if self._cos_sin is None:
            every = torch.arange(self.context_length, device=positions.device)
            self._cos_sin = torch.cat(rope.cos_sin(every), dim=-1)
        return positions, self._cos_sin

    def rotate_qk(self, qk: torch.Tensor, num_heads: int, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.rotate_qk`; in place."""
        positions, cos_sin = angles
        if positions.is_floating_point():
            return super().rotate_qk(qk, num_heads, angles)
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, qk.shape[-1], cos_sin)
        return q, k
