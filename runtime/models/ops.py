"""The model's small operations: in torch, which is the specification, and through FlashInfer where it helps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.parallel.group import Group


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, head_dim] by half-split RoPE with cos and sin [rows, head_dim / 2]."""
    half = x.shape[-1] // 2
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class Ops:
    """In torch, on any device and in any dtype; chosen once, when a model is loaded.

    Args:
        group: the ranks whose partial products are summed; None: one process computes all.
    """

    def __init__(self, group: Group | None = None):
        self.group = group

    def add_linear(
        self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x + y @ weight^T (+ bias), where weight's columns are shared out among the ranks; may overwrite x."""
        if self.group is not None:
            return self.group.sum(F.linear(y, weight, bias)).add_(x)
        # The residual goes into the matrix product.
        out = torch.addmm(x, y, weight.t())
        return out if bias is None else out.add_(bias)

    def logits(self, x: torch.Tensor, head: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """x @ head^T as float32 [rows, vocab_size], where head's rows are shared out among the ranks."""
        if self.group is None:
            return F.linear(x, head).float()
        return self.group.side_by_side(F.linear(x, head))[:, :vocab_size].float()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up of a [rows, 2 * n] tensor that holds gate and up side by side."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class FlashInferOps(Ops):
    """One kernel each; CUDA, half precision. Rotation stays in torch: explicit positions need no table there."""

    def __init__(self, group: Group | None = None):
        super().__init__(group)
        import flashinfer

        self._flashinfer = flashinfer

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        flat = x.reshape(-1, x.shape[-1])
        return self._flashinfer.rmsnorm(flat, weight, eps).view(x.shape)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_and_mul`."""
        return self._flashinfer.silu_and_mul(gate_up)
