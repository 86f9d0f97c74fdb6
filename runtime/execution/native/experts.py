"""Mixtures of experts whose matrix products run in the native kernels."""

import ctypes

import torch

from runtime.execution.experts import Experts
from runtime.execution.native import library as c
from runtime.execution.native.packed import PackedWeights, Team, describe, packed_bytes
from runtime.execution.native.stored import StoredExperts
from runtime.models.mxfp4 import PackedExperts, PackedRows


class NativeExperts(Experts):
    """The experts of one layer on a CPU, in float32 or bfloat16."""

    __slots__ = ("_down", "_gate", "_gate_up", "_router", "_shared")

    def __init__(
        self,
        experts: Experts,
        team: Team,
        bits: int,
        shared: tuple[torch.Tensor, torch.Tensor] | None = None,
        shared_gate: torch.Tensor | None = None,
        stored: StoredExperts | None = None,
    ):
        """Move the weights out of `experts`. Raises MemoryError.

        Args:
            shared: gate over up [2 * spec.shared, hidden] and down [hidden, spec.shared] of the expert of all rows.
            shared_gate: [1, hidden]; its sigmoid multiplies what the shared expert gives.
            stored: matrices of a GGUF file, in place of those of `experts` and `shared`.
        """
        gate_up, down = (
            one.each() if isinstance(one, PackedExperts) else one for one in (experts.gate_up, experts.down)
        )
        # New tensors, because views would keep the weights in memory.
        experts.gate_up, experts.down = torch.empty(0), torch.empty(0)
        super().__init__(experts.spec, experts.ops, experts.router, experts.gate_up, experts.down, experts.bias)
        is_paired = self.spec.limit is None
        described = [describe(experts.router)]
        shared = shared if self.spec.shared else None
        if stored is None:
            described += [describe(gate_up[0], is_paired, bits), describe(down[0], bits=bits)] * self.spec.count
            if shared is not None:
                described += [describe(shared[0], True, bits), describe(shared[1], bits=bits)]
        if shared_gate is not None:
            described.append(describe(shared_gate))
        packed = PackedWeights(team, sum(packed_bytes(team.library, one) for one in described))
        bias = None if experts.router_bias is None else experts.router_bias[None]
        self._router = _pack(packed, experts.router[None], bias)
        self._gate = None if shared_gate is None else _pack(packed, shared_gate[None])
        self._shared: tuple[_Stack, _Stack] | None = None
        if stored is not None:
            self._gate_up = _stack(packed, stored.gate_up, experts.gate_up_bias)
            self._down = _stack(packed, stored.down, experts.down_bias)
            if stored.shared is not None:
                self._shared = _Stack(packed, [stored.shared[0]]), _Stack(packed, [stored.shared[1]])
            return
        self._gate_up = _pack(packed, gate_up, experts.gate_up_bias, is_paired, bits)
        self._down = _pack(packed, down, experts.down_bias, bits=bits)
        if shared is not None:
            first, second = (one[None] for one in shared)
            self._shared = _pack(packed, first, None, True, bits), _pack(packed, second, bits=bits)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = super().__call__(x)
        if self._shared is not None:
            gate_up, down = self._shared
            inner = gate_up.multiply(x, 0)
            if self._gate is not None:
                # In float64, because torch's float32 sigmoid rounds a number differently by its place in the tensor.
                inner *= self._gate.multiply(x, 0).double().sigmoid().float()
            total += down.multiply(inner, 0)
        return total

    def _scores(self, x: torch.Tensor) -> torch.Tensor:
        # Not with torch, whose rounding depends on the number of rows.
        return self._router.multiply(x, 0)

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        inner = self._gate_up.multiply(x, expert)
        return self._down.multiply(inner if self.spec.limit is None else self._gated(inner), expert)


class _Stack:
    """One matrix for each expert. If they are gate over up, `multiply` applies SiLU."""

    def __init__(self, packed: PackedWeights, matrices: list[c.Matrix]):
        self._packed, self._matrices = packed, matrices
        paired = bool(matrices[0].is_paired)
        self._columns, self._into = matrices[0].n // (2 if paired else 1), c.SILU if paired else 0

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """The product of rows [n, in] and one expert's weight, float32 [n, out]."""
        x = x.float().contiguous()
        out = x.new_empty(len(x), self._columns)
        product = c.Product(
            a=x.data_ptr(),
            lda=x.shape[1],
            m=len(x),
            w=ctypes.pointer(self._matrices[expert]),
            c=out.data_ptr(),
            ldc=self._columns,
            columns=self._columns,
            into=self._into,
        )
        team = self._packed.team
        team.library.multiply(team.handle, ctypes.byref(product))
        return out


def _stack(packed: PackedWeights, matrices: list[c.Matrix], bias: torch.Tensor | None) -> _Stack:
    """Give packed matrices their biases [experts, out]."""
    for matrix, one in zip(matrices, [] if bias is None else bias, strict=bias is not None):
        matrix.bias = packed.keep_bias(matrix, one)
    return _Stack(packed, matrices)


def _pack(
    packed: PackedWeights,
    weight: torch.Tensor | list[PackedRows],
    bias: torch.Tensor | None = None,
    paired: bool = False,
    bits: int = 0,
) -> _Stack:
    """Pack weights [experts, out, in] with biases [experts, out]. `paired`: each is gate over up."""
    biases = [None] * len(weight) if bias is None else bias
    return _Stack(packed, [packed.add(one, b, paired, bits) for one, b in zip(weight, biases, strict=True)])
