"""A layer's experts in the kernels, as a function of rows."""

import ctypes

import torch

from runtime.execution.experts import Experts
from runtime.execution.native.experts import NativeExperts
from runtime.execution.native.library import Library
from runtime.execution.native.packed import Team


def mix(team: Team, native: NativeExperts, x: torch.Tensor) -> torch.Tensor:
    """The outputs for rows, float32 [n, hidden]."""
    x, out = x.contiguous(), torch.zeros_like(x)
    team.library.mix(team.handle, ctypes.byref(native.struct), x.data_ptr(), out.data_ptr(), x.shape[1], len(x))
    return out


class Mixture:
    def __init__(self, library: Library, experts: Experts, threads: int = 2, bits: int = 0, **shared: torch.Tensor):
        self._team = Team(library, threads)
        self._native = NativeExperts(experts, self._team, bits, **shared)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return mix(self._team, self._native, x)
