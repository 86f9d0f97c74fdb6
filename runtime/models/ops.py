"""The model's small operations: in torch, which is the specification, and through FlashInfer where it helps."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, head_dim] by half-split RoPE with cos and sin [rows, head_dim / 2]."""
    half = x.shape[-1] // 2
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Ops:
    """In torch, on any device and in any dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, in float32, cast back before the weight is applied."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up of a [rows, 2 * n] tensor that holds gate and up side by side."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


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
