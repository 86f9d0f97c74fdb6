"""Layers with a state: one token after the other, in float32, so that a sequence cut anywhere gives the same bits."""

from abc import abstractmethod

import torch
import torch.nn.functional as F

from runtime.batch import StateRows
from runtime.execution.mixers.mixer import LayerWeights, MixedRows, Mixer
from runtime.kv.states import StatePool
from runtime.models.recurrence import RecurrenceSpec


class Recurrent(Mixer):
    """A layer with a state.

    Attributes:
        order: place of the layer among the recurrent ones.
        inputs, inputs_bias: [columns, hidden] and [columns], the projections of `project`.
        taps: float32 [width, channels], weights of the convolution by the age of its input, the oldest first.
        tap_bias: float32 [channels].
    """

    inputs: torch.Tensor
    inputs_bias: torch.Tensor | None = None

    def __init__(self, spec: RecurrenceSpec, weights: LayerWeights, order: int, conv: str):
        self.spec, self.order = spec, order
        self.taps = weights.must(f"{conv}.weight")[:, 0].t().float().contiguous()
        bias = weights.one(f"{conv}.bias")
        self.tap_bias = None if bias is None else bias.float()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """What the recurrence reads, float32 [T, columns] of x [T, hidden]: first the columns of the record."""
        return F.linear(x, self.inputs, self.inputs_bias).float()

    @abstractmethod
    def advance(self, given: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
        """Outputs, float32 [n, width], of records [n, record] of consecutive tokens; updates the state."""

    @abstractmethod
    def finish(self, out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The result, float32 [T, width], of the outputs of `advance`; `given`: the result of `project`."""

    def mix(self, x: torch.Tensor, rows: MixedRows) -> torch.Tensor:
        given = self.project(x)
        record, pool = given[:, : self.spec.record].contiguous(), rows.states_in
        assert pool is not None
        outputs = [part for one in rows.states for part in self._run(one, record, pool)]
        return self.finish(torch.cat(outputs), given).to(x.dtype)

    def _run(self, one: StateRows, record: torch.Tensor, pool: StatePool) -> list[torch.Tensor]:
        """Outputs of consecutive parts of a sequence's rows."""
        tensors = self.tensors_in(pool)
        records, state = pool.records[self.order], [tensor[one.target] for tensor in tensors]
        if one.target != one.slot:
            for tensor in tensors:
                tensor[one.target] = tensor[one.slot]
        if one.accepted:
            self.advance(records[one.slot][: one.accepted], state)
        found, first, real = [], one.first, one.stop - one.draft
        for row, slot in sorted(one.saves):
            found.append(self.advance(record[first : row + 1], state))
            first = row + 1
            for tensor in tensors:
                tensor[slot] = tensor[one.target]
        if first < real:
            found.append(self.advance(record[first:real], state))
        if one.draft:
            records[one.target][: one.draft] = record[real : one.stop]
            found.append(self.advance(record[real : one.stop], [part.clone() for part in state]))
        return found

    def tensors_in(self, pool: StatePool) -> list[torch.Tensor]:
        """The layer's tensors in the pool."""
        count = len(self.spec.states)
        return pool.tensors[self.order * count : (self.order + 1) * count]

    def convolve(self, rows: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """A causal convolution of rows [n, channels] behind `tail` [channels, width - 1], which is updated."""
        every, n = torch.cat((tail.t(), rows)), len(rows)
        out = every[:n] * self.taps[0]
        for i in range(1, len(self.taps)):
            out += every[i : i + n] * self.taps[i]
        tail.copy_(every[n:].t())
        return out if self.tap_bias is None else out + self.tap_bias
