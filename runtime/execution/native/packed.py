"""Weights in the layout of the native kernels, and the kernels' thread pool."""

import ctypes
import weakref

import torch

from runtime.execution.native import library as c
from runtime.execution.native.library import Library

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
        library = team.library
        self._next = library.allocate(num_bytes)
        if self._next is None:
            raise MemoryError(f"{num_bytes} bytes for the packed weights")
        self._end = self._next + num_bytes
        self._kept: list[torch.Tensor] = []
        self._finalizer = weakref.finalize(self, library.free, self._next, num_bytes)

    def add(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, paired: bool = False, int8: bool = False
    ) -> c.Matrix:
        """Pack a weight [n, k], float32 or bfloat16, with its bias [n]. `paired`: gate over up in one weight."""
        library, weight = self.team.library, (weight.float() if int8 else weight).contiguous()
        matrix = describe(weight, paired, int8)
        matrix.data = self._next
        self._next += packed_bytes(library, matrix)
        assert self._next <= self._end
        library.pack(self.team.handle, ctypes.byref(matrix), weight.data_ptr())
        if bias is not None:
            columns = range(library.matrix_columns(ctypes.byref(matrix)))
            rows = torch.tensor([library.matrix_source_row(ctypes.byref(matrix), i) for i in columns])
            matrix.bias = self.keep(bias.float()[rows.clamp_min(0)].masked_fill(rows < 0, 0))
        return matrix

    def keep(self, tensor: torch.Tensor) -> int:
        """Keep a tensor as long as the weights; returns its address."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def describe(weight: torch.Tensor, paired: bool = False, int8: bool = False) -> c.Matrix:
    """The description of a weight [n, k], without data."""
    n, k = weight.shape
    return c.Matrix(n=n, k=k, storage=2 if int8 else int(weight.dtype == torch.bfloat16), is_paired=paired)


def packed_bytes(library: Library, matrix: c.Matrix) -> int:
    """Bytes that a matrix takes in `PackedWeights`."""
    return -(-library.matrix_bytes(ctypes.byref(matrix)) // _ALIGNMENT) * _ALIGNMENT
