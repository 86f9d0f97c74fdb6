"""MXFP4 weights: 4-bit floats in blocks of 32 that share a power of two (OCP Microscaling Formats, 2023)."""

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


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
