"""The model's small operations: in torch, which is the specification, and through FlashInfer where it helps."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, head_dim] by half-split RoPE with cos and sin [rows, head_dim / 2]."""
    half = x.shape[-1] // 2
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def add_linear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x + y @ weight^T (+ bias): the residual goes into the matrix product."""
    out = torch.addmm(x, y, weight.t())
    return out if bias is None else out.add_(bias)


class Ops:
    """In torch, on any device and in any dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up of a [rows, 2 * n] tensor that holds gate and up side by side."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class FlashInferOps(Ops):
    """One kernel each; CUDA, half precision. Rotation stays in torch: explicit positions need no table there."""

    def __init__(self) -> None:
        import flashinfer

        self._flashinfer = flashinfer

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        flat = x.reshape(-1, x.shape[-1])
        return self._flashinfer.rmsnorm(flat, weight, eps).view(x.shape)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_and_mul`."""
        return self._flashinfer.silu_and_mul(gate_up)
