"""Layers with a state, in float32.

On a CPU, sequences are computed one by one, and a sequence cut anywhere gives the same
bits, given the same rows. On a GPU, all sequences are computed together, and gated delta nets in chunks: the operations
of a step do not grow with its rows, and results are the same up to rounding.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F

from runtime.batch import StateRows
from runtime.execution.mixers.mixer import LayerWeights, MixedRows, Mixer
from runtime.execution.mixers.state_plan import StatePlan, plan_states
from runtime.kv.states import StatePool
from runtime.models.recurrence import RecurrenceSpec


class Recurrent(Mixer):
    """A layer with a state.

    Attributes:
        order: place of the layer among the recurrent ones.
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
    def advance_all(self, tape: torch.Tensor, plan: StatePlan, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Outputs, float32 [T, width], of records [m, record] on the plan's tape; updates the states in `tensors`."""

    @abstractmethod
    def finish(self, out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The result, float32 [T, width], of the outputs of `advance`; `given`: the result of `project`."""

    def mix(self, x: torch.Tensor, rows: MixedRows) -> torch.Tensor:
        given, pool = self.project(x), rows.states_in
        record = given[:, : self.spec.record]
        assert pool is not None
        if rows.is_chunked:
            if rows.state_plan is None:
                rows.state_plan = plan_states(rows.states, self.spec.width, x.device)
            out = self._run_all(rows.state_plan, record, pool)
        else:
            record = record.contiguous()
            out = torch.cat([part for one in rows.states for part in self._run(one, record, pool)])
        return self.finish(out, given).to(x.dtype)

    def _run_all(self, plan: StatePlan, record: torch.Tensor, pool: StatePool) -> torch.Tensor:
        """Outputs of a step's rows."""
        kept = pool.records[self.order].flatten(0, 1)
        tape = torch.cat((record, kept[plan.again])) if len(plan.again) else record
        if len(plan.guesses):
            kept.index_copy_(0, plan.records, record[plan.guesses])
        return self.advance_all(tape[plan.tape], plan, self.tensors_in(pool))

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
        tail.copy_(every[n:].t())
        return self._filter(every)

    def convolve_all(self, tape: torch.Tensor, plan: StatePlan, tails: torch.Tensor) -> torch.Tensor:
        """The convolution's results for inputs [m, channels] on the plan's tape; updates `tails` [slots, ...]."""
        earlier = tails[plan.first].transpose(1, 2).flatten(0, 1)
        tape = tape.index_copy(0, plan.earlier, earlier)
        tails.index_copy_(0, plan.slots, tape[plan.ends].transpose(1, 2))
        return self._filter(tape)

    def _filter(self, every: torch.Tensor) -> torch.Tensor:
        n = len(every) - len(self.taps) + 1
        out = every[:n] * self.taps[0]
        for i in range(1, len(self.taps)):
            out += every[i : i + n] * self.taps[i]
        return out if self.tap_bias is None else out + self.tap_bias
