"""Gated short convolutions (LFM2)."""

import torch

from runtime.execution.mixers.mixer import LayerWeights
from runtime.execution.mixers.recurrent import Recurrent
from runtime.execution.mixers.state_plan import StatePlan
from runtime.models.recurrence import ConvSpec


class ShortConv(Recurrent):
    """C * conv(B * x). The projections are ordered B, x, C, so that the record is B and x."""

    def __init__(self, spec: ConvSpec, weights: LayerWeights, order: int):
        super().__init__(spec, weights, order, "conv.conv")
        b, c, x = weights.must("conv.in_proj.weight").chunk(3)
        self.inputs, self.inputs_bias = torch.cat((b, x, c)), weights.one("conv.in_proj.bias")
        if self.inputs_bias is not None:
            b, c, x = self.inputs_bias.chunk(3)
            self.inputs_bias = torch.cat((b, x, c))

    def advance(self, given: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        gate, x = given.chunk(2, dim=1)
        return self.convolve(gate * x, state[0])

    def advance_all(self, tape: torch.Tensor, plan: StatePlan, tensors: list[torch.Tensor]) -> torch.Tensor:
        gate, x = tape.chunk(2, dim=1)
        return self.convolve_all(gate * x, plan, tensors[0])[plan.rows]

    def finish(self, out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return out * given[:, 2 * self.spec.channels :]
