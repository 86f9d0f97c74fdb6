"""Rotary position embeddings of explicit positions. Angles are linear in the position, so keys can be shifted."""

import math

import torch
import torch.nn.functional as F

from runtime.models.rope_spec import RopeSpec


class RotaryEmbedding:
    """Half-split RoPE.

    Attributes:
        inv_freq: float32 [head_dim / 2], radians per position; 0 for pairs of dimensions that are not rotated.
        axes: int64 [head_dim / 2], which of a row's positions each pair of dimensions takes.
        amplitude: factor on cos and sin of rotated pairs (yarn's attention scaling; else 1).
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device):
        turned = rope.rotated or head_dim
        inv_freq = 1.0 / (rope.theta ** (torch.arange(0, turned, 2, dtype=torch.int64).float() / turned))
        self.amplitude = 1.0
        if rope.kind == "linear":
            inv_freq = inv_freq / rope.factor
        elif rope.kind == "llama3":
            inv_freq = _llama3(inv_freq, rope)
        elif rope.kind == "yarn":
            inv_freq, self.amplitude = _yarn(inv_freq, rope, turned)
        rest = (0, (head_dim - turned) // 2)
        self._amplitudes = F.pad(torch.full_like(inv_freq, self.amplitude), rest, value=1.0).to(device)
        self.inv_freq = F.pad(inv_freq, rest).to(device)
        self.axes = F.pad(torch.tensor(rope.axes or (0,) * len(inv_freq)), rest).to(device)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, head_dim / 2], of int64 positions [T], or [T, 3] with one for each axis."""
        each = positions[:, None] if positions.ndim == 1 else positions[:, self.axes]
        angles = each.float() * self.inv_freq
        return angles.cos() * self._amplitudes, angles.sin() * self._amplitudes

    def shift(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, head_dim / 2], that move already rotated rows by `shifts` positions, int64 [T].

        The amplitude is left out, since the rows have it already. Angles are computed in float64 to add no error.
        """
        angles = shifts.double()[:, None] * self.inv_freq
        return angles.cos().float(), angles.sin().float()


def pairs_in_halves(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """An order of a head's dimensions, int64 [head_dim], that turns a partial rotation into half-split RoPE.

    Query-key products do not change if the weights of both are reordered this way.
    """
    turned = rope.rotated or head_dim
    parts = torch.arange(turned), torch.arange(turned, head_dim)
    return torch.cat([part.view(2, -1)[half] for half in (0, 1) for part in parts])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [rows, heads, head_dim] by half-split RoPE with float32 cos and sin [rows or 1, head_dim / 2].

    The arithmetic is float32, because cos and sin in bfloat16 would change the angle. The result has x's dtype.
    """
    half, cos, sin = x.shape[-1] // 2, cos[:, None], sin[:, None]
    wide = x.float()
    first, second = wide[..., :half], wide[..., half:]
    out = torch.empty_like(wide, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out.to(x.dtype)


def _llama3(inv_freq: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, intermediate ones blended."""
    original, low, high = rope.original_context, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, scaled)


def _yarn(inv_freq: torch.Tensor, rope: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): a ramp over dimensions between interpolation and extrapolation."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp), rope.amplitude
