"""Weights in the layout of the native kernels, and the kernels' thread pool."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

from runtime.execution.native import library as c
from runtime.execution.native.library import Library

if TYPE_CHECKING:
    from runtime.models.mxfp4 import PackedRows

_ALIGNMENT = 4096


class Team:
    """A thread pool that includes the caller; its threads sleep between steps."""

    def __init__(self, library: Library, threads: int):
        self.library = library
        self.handle = library.team_create(threads)
        self._finalizer = weakref.finalize(self, library.team_destroy, self.handle)


class PackedWeights:
    """One allocation in huge pages, which packed matrices fill one after the other."""

    def __init__(self, team: Team, num_bytes: int):
        """Raises MemoryError."""
        self.team = team
        library, num_bytes = team.library, max(num_bytes, _ALIGNMENT)
        self._next = library.allocate(num_bytes)
        if self._next is None:
            raise MemoryError(f"{num_bytes} bytes for the packed weights")
        self._end = self._next + num_bytes
        self._kept: list[torch.Tensor] = []
        self._finalizer = weakref.finalize(self, library.free, self._next, num_bytes)

    def add(
        self, weight: torch.Tensor | PackedRows, bias: torch.Tensor | None = None, paired: bool = False, bits: int = 0
    ) -> c.Matrix:
        """Pack a weight [n, k], float32, bfloat16 or MXFP4, with its bias [n].

        Args:
            paired: whether the weight is gate over up.
            bits: 4 or 8 rounds the weight to codes of that size; 0 keeps it.
        """
        matrix = describe(weight, paired, bits)
        matrix.data = self._next
        self._next += packed_bytes(self.team.library, matrix)
        assert self._next <= self._end
        pack(self.team, matrix, weight)
        matrix.bias = self.keep_bias(matrix, bias)
        return matrix

    def keep_bias(self, matrix: c.Matrix, bias: torch.Tensor | None) -> int | None:
        """The address of a bias [n] in the order of the matrix's columns."""
        if bias is None:
            return None
        from runtime.execution.native.codes import panel_rows

        order = torch.from_numpy(panel_rows(matrix.n, bool(matrix.is_paired), self.team.library.panel)).flatten()
        return self.keep(bias.float()[order.clamp_min(0)].masked_fill(order < 0, 0))

    def keep(self, tensor: torch.Tensor) -> int:
        """Keep a tensor as long as the weights; returns its address."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def describe(weight: torch.Tensor | PackedRows, paired: bool = False, bits: int = 0) -> c.Matrix:
    """The description of a weight [n, k], without data; see `PackedWeights.add`."""
    n, k = weight.shape
    if not isinstance(weight, torch.Tensor):
        from runtime.execution.native.codes import describe_codes

        return describe_codes(weight.codes(slice(1)), n, paired)
    if bits:
        return c.Matrix(n=n, k=k, storage=c.CODES, is_paired=paired, bits=bits, group=32, has_minima=bits == 4)
    return c.Matrix(n=n, k=k, storage=int(weight.dtype == torch.bfloat16), is_paired=paired)


def pack(team: Team, matrix: c.Matrix, weight: torch.Tensor | PackedRows) -> None:
    """Write a weight [n, k] to `matrix.data`."""
    library = team.library
    if matrix.storage == c.CODES:
        from runtime.execution.native.codes import pack_into
        from runtime.models.ggml import encode

        size = library.matrix_bytes(ctypes.byref(matrix))
        to = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(matrix.data))
        if isinstance(weight, torch.Tensor):
            pack_into(to, matrix, lambda rows: encode(weight[rows].float().numpy(), matrix.bits), library.panel)
        else:
            pack_into(to, matrix, weight.codes, library.panel)
    else:
        assert isinstance(weight, torch.Tensor)
        library.pack(team.handle, ctypes.byref(matrix), weight.contiguous().data_ptr())


def packed_bytes(library: Library, matrix: c.Matrix) -> int:
    """Bytes that a matrix takes in `PackedWeights`."""
    return -(-library.matrix_bytes(ctypes.byref(matrix)) // _ALIGNMENT) * _ALIGNMENT
