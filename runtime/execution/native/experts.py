"""Mixtures of experts in the native kernels."""

import torch

from runtime.execution.experts import Experts
from runtime.execution.native import library as c
from runtime.execution.native.packed import PackedWeights, Team, describe, packed_bytes
from runtime.execution.native.stored import StoredExperts
from runtime.models.mxfp4 import PackedExperts, PackedRows

Shared = tuple[torch.Tensor, torch.Tensor]


class NativeExperts:
    """The packed experts of one layer.

    Attributes:
        matrices: gate over up of each expert, and down of each expert; the shared one is last.
        struct: their description for the kernels.
    """

    def __init__(
        self,
        experts: Experts,
        team: Team,
        bits: int,
        shared: Shared | None = None,
        shared_gate: torch.Tensor | None = None,
        stored: StoredExperts | None = None,
    ):
        """Move the weights out of `experts`. Raises MemoryError.

        Args:
            shared: gate over up [2 * spec.shared, hidden] and down [hidden, spec.shared] of the expert of all rows.
            shared_gate: [1, hidden]; its sigmoid multiplies what the shared expert gives.
            stored: quantised matrices, in place of those of `experts` and `shared`.
        """
        spec = experts.spec
        # The bounded gate of gpt-oss reads gate and up apart.
        is_paired = spec.limit is None
        gate_up: list[torch.Tensor | PackedRows] = []
        down: list[torch.Tensor | PackedRows] = []
        if stored is None:
            gate_up, down = [*_each(experts.gate_up)], [*_each(experts.down)]
            if shared is not None and spec.shared:
                gate_up.append(shared[0])
                down.append(shared[1])
        # New tensors, because views would keep the weights in memory.
        experts.gate_up, experts.down = torch.empty(0), torch.empty(0)
        described = [describe(one, is_paired, bits) for one in gate_up] + [describe(one, bits=bits) for one in down]
        described += [describe(one) for one in (experts.router, shared_gate) if one is not None]
        self._packed = PackedWeights(team, sum(packed_bytes(team.library, one) for one in described))
        biases = [_each_bias(one, spec.count) for one in (experts.gate_up_bias, experts.down_bias)]
        if stored is None:
            matrices = [
                [self._packed.add(one, bias, paired, bits) for one, bias in zip(weights, all_biases, strict=False)]
                for weights, all_biases, paired in ((gate_up, biases[0], is_paired), (down, biases[1], False))
            ]
        else:
            matrices = [list(stored.gate_up), list(stored.down)]
            for one, all_biases in zip(matrices, biases, strict=True):
                for matrix, bias in zip(one, all_biases, strict=False):
                    matrix.bias = self._packed.keep_bias(matrix, bias)
            if stored.shared is not None:
                for one, matrix in zip(matrices, stored.shared, strict=True):
                    one.append(matrix)
        self.matrices = tuple((c.Matrix * len(one))(*one) for one in matrices)
        self.struct = c.ExpertsStruct(
            router=self._packed.add(experts.router, experts.router_bias),
            shared_gate=c.Matrix() if shared_gate is None else self._packed.add(shared_gate),
            gate_up=self.matrices[0],
            down=self.matrices[1],
            bias=None if experts.bias is None else self._packed.keep(experts.bias.float()),
            has_shared=len(matrices[0]) - spec.count,
            inner=max(spec.inner, spec.shared),
            is_sigmoid=spec.sigmoid,
            is_normalized=spec.normalized,
            limit=spec.limit or 0,
            **{name: getattr(spec, name) for name in c.EXPERT_FIELDS},
        )


def _each(weight: torch.Tensor | PackedExperts) -> list[torch.Tensor | PackedRows]:
    return list(weight.each() if isinstance(weight, PackedExperts) else weight)


def _each_bias(bias: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    """A bias for each expert, and none for the shared one."""
    biases: list[torch.Tensor | None] = [None] * count if bias is None else list(bias)
    return [*biases, None]
