"""Quantised weights of linear layers: codes with scales, as published checkpoints store them."""

from dataclasses import dataclass

import numpy as np
import torch

from runtime.models.ggml import Codes

# Columns that share a scale in the kernels' codes.
KERNEL_GROUP = 32
# Of each 8 values that AWQ packs into 32 bits: the place of the first, second, ...
_AWQ_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(slots=True)
class CodedWeight:
    """A weight [out, in]: scale * (code - zero).

    Attributes:
        bits: of a code.
        codes: uint8 or float8 [out, in].
        scales: of any float type, [blocks of rows, blocks of columns].
        blocks: rows and columns of a block.
        zeros: int16 [out, blocks of columns]; None: float8, which has none.
        order: int64 [in], each column's block; None: neighbours share a block.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    blocks: tuple[int, int]
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        n, k = self.codes.shape
        scales, zeros, columns = self.scales.float(), self.zeros, self.blocks[1]
        if self.blocks[0] > 1:
            scales = scales.repeat_interleave(self.blocks[0], 0)[:n]
        if self.order is not None or k % columns:
            order = torch.arange(k, device=scales.device) // columns if self.order is None else self.order
            scales, zeros, columns = scales[:, order], None if zeros is None else zeros[:, order], 1
        values = self.codes.float()
        blocks = values.view(n, -1, columns)
        if zeros is not None:
            blocks -= zeros[..., None]
        blocks *= scales[..., None]
        return values

    def to(self, device: torch.device) -> "CodedWeight":
        parts = (None if one is None else one.to(device) for one in (self.codes, self.scales, self.zeros, self.order))
        codes, scales, zeros, order = parts
        assert codes is not None
        assert scales is not None
        return CodedWeight(self.bits, codes, scales, self.blocks, zeros, order)

    def code_bits(self, k: int) -> int | None:
        """Bits of the kernels' codes that hold the weight exactly; None: none do. `k`: inputs.

        Codes of 5 bits hold all differences of a 4-bit code and its zero.
        """
        zeros = self.zeros
        if zeros is None or self.order is not None or k % KERNEL_GROUP:
            return None
        if self.blocks[1] % KERNEL_GROUP and self.scales.shape[1] > 1:
            return None
        if not torch.equal(self.scales.half().float(), self.scales.float()):
            return None
        if bool((zeros == 2 ** (self.bits - 1)).all()):
            return self.bits
        return 5 if self.bits == 4 else None

    def as_codes(self, bits: int) -> Codes:
        """The kernels' codes of a weight with blocks of one row, if `code_bits` are `bits`."""
        assert self.zeros is not None
        columns = torch.arange(self.codes.shape[1]) // self.blocks[1]
        levels = self.codes.short() - self.zeros[:, columns] + 2 ** (bits - 1)
        scales = self.scales.half()[:, columns[::KERNEL_GROUP]].contiguous()
        return Codes(bits, levels.to(torch.uint8).numpy(), scales.numpy())

    def rows(self, wanted: np.ndarray) -> "CodedWeight":
        """Some rows, as a weight with blocks of one row."""
        index = torch.from_numpy(wanted)
        scales, zeros = self.scales[index // self.blocks[0]], None if self.zeros is None else self.zeros[index]
        # Not all types of 8 bits can be indexed.
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)
        return CodedWeight(self.bits, codes, scales, (1, self.blocks[1]), zeros, self.order)

    @classmethod
    def stacked(cls, parts: "list[CodedWeight]") -> "CodedWeight | None":
        """Weights with blocks of one row, one over the other; None: they are stored in different ways."""
        one = parts[0]
        if len({(part.bits, part.blocks, part.codes.dtype, part.zeros is None) for part in parts}) > 1:
            return None
        if len(parts) > 1 and any(part.order is not None for part in parts):
            return None
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(one.codes.dtype)
        zeros = None if one.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
        return cls(one.bits, codes, torch.cat([part.scales for part in parts]), one.blocks, zeros, one.order)


def unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n, 32 / bits * width] of int32 [n, width], the lowest bits first."""
    octets = packed.flatten().view(torch.uint8).view(len(packed), -1)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int) -> CodedWeight:
    """A weight of AWQ's gemm layout.

    Args:
        qweight: int32 [in, out / 8]; 8 outputs are interleaved.
        qzeros: int32 [groups, out / 8], likewise.
        scales: float16 [groups, out].
        group: columns of a group.
    """

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        return unpacked(packed, 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).t()

    codes, zeros = in_order(qweight).contiguous(), in_order(qzeros).short()
    return CodedWeight(4, codes, scales.t().contiguous(), (1, group), zeros)


def from_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group: int, bits: int, offset: int
) -> CodedWeight:
    """A weight of GPTQ's layout, without the order of its columns.

    Args:
        qweight: int32 [in * bits / 32, out].
        qzeros: int32 [groups, out * bits / 32].
        scales: float16 [groups, out].
        group: columns of a group.
        bits: 4 or 8.
        offset: what is added to stored zeros, without carry: 1 in the first version of the layout.
    """
    zeros = (unpacked(qzeros, bits).short() + offset & 2**bits - 1).t()
    return CodedWeight(bits, unpacked(qweight.t(), bits), scales.t().contiguous(), (1, group), zeros)
