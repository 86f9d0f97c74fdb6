"""MXFP4 weights: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats, 2023)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from runtime.models.ggml import Codes, mxfp4_codes

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


@dataclass(slots=True)
class PackedRows:
    """A weight [out, in]: `blocks` and `scales` as of `unpack`, without the experts."""

    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], 2 * self.blocks[0].numel()

    def codes(self, rows: np.ndarray | slice) -> Codes:
        """Exact codes of some rows. Raises ModelError."""
        blocks = self.blocks.numpy()[rows]
        pairs = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:2], -1)
        return mxfp4_codes(pairs, self.scales.numpy()[rows])


class PackedExperts(NamedTuple):
    """One weight for each expert; see `unpack`."""

    blocks: torch.Tensor
    scales: torch.Tensor

    def each(self) -> list[PackedRows]:
        return [PackedRows(*both) for both in zip(self.blocks, self.scales, strict=True)]


def unpack(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack a weight on the CPU; returns [experts, out, in]. To save memory, one expert at a time is float32.

    Args:
        blocks: uint8 [experts, out, in / 32, 16], two numbers per byte, the first in the lower half.
        scales: uint8 [experts, out, in / 32], biased exponents.
        dtype: dtype of the result; bfloat16 and float32 represent every number exactly.
    """
    # `pairs` maps a byte to its two numbers.
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    out = torch.empty(*blocks.shape[:2], 2 * blocks[0, 0].numel(), dtype=dtype)
    for one, block, scale in zip(out, blocks, scales, strict=True):
        numbers = pairs[block.int()].flatten(2)
        one.copy_(numbers.ldexp_(scale[..., None].int() - _EXPONENT_BIAS).flatten(1))
    return out
