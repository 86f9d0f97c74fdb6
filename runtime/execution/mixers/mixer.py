"""The interface of mixers, and what they read in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runtime.batch import StateRows
from runtime.execution.adapters import Adapted
from runtime.execution.attention.backend import AttentionBackend
from runtime.kv.pool import KVPool

if TYPE_CHECKING:
    from runtime.execution.mixers.state_plan import StatePlan
    from runtime.kv.states import StatePool


@dataclass(slots=True)
class Attend:
    """Writes the new KV of a layer group and computes its attention.

    Attributes:
        prepared: the group's plan, prepared by `backend`.
        slots: int64 [n], pool slots to write.
        written: int64 [n], the row that writes each slot; None: all rows, in order.
    """

    pool: KVPool
    backend: AttentionBackend
    prepared: Any
    slots: torch.Tensor
    written: torch.Tensor | None

    def run(self, place: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v [T', kv_heads, head_dim] in a layer of the pool, and attend with q [T', heads, head_dim]."""
        if self.written is not None:
            k, v = k[self.written], v[self.written]
        self.pool.write(place, self.slots, k, v)
        return self.backend.run(self.prepared, q, place)


@dataclass(slots=True)
class MixedRows:
    """The rows of a layer group, beside their hidden states.

    Attributes:
        angles: argument of `Ops.rotate_qk`.
        adapted: the rows with an adapter.
        states, states_in: the rows by sequence, and the pool of their states; only for models with recurrent layers.
        is_chunked: whether recurrent layers compute the sequences together.
        state_plan: how they do, which the first of them plans.
    """

    attend: Attend
    angles: Any
    adapted: Sequence[Adapted]
    states: Sequence[StateRows] = ()
    states_in: StatePool | None = None
    is_chunked: bool = False
    state_plan: StatePlan | None = None


class Mixer(ABC):
    """The part of a layer in which rows see other rows.

    Attributes:
        inputs, inputs_bias: [columns, hidden] and [columns], the one product with x; None: there are others.
    """

    inputs: torch.Tensor | None
    inputs_bias: torch.Tensor | None

    @abstractmethod
    def mix(self, x: torch.Tensor, rows: MixedRows) -> torch.Tensor:
        """The input [T', width] of the product that is added to the residual, for normalised states x [T', hidden]."""


class KVMixer(Mixer):
    """A mixer with keys and values in the pool. `place`: the layer of the pool."""

    place: int

    @abstractmethod
    def project(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        """Rotated queries, rotated keys and values, float32 [n, heads + 2 kv_heads, head_dim], of x [n, hidden].

        `angles`: see `Ops.rotate_qk`.
        """


class LayerWeights:
    """The tensors of one layer, taken out of a model's weights one by one."""

    def __init__(self, weights: dict[str, torch.Tensor], prefix: str, device: torch.device):
        self._weights, self._prefix, self._device = weights, prefix, device

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._weights

    def one(self, name: str) -> torch.Tensor | None:
        tensor = self._weights.pop(self._prefix + name, None)
        return None if tensor is None else tensor.to(self._device)

    def must(self, name: str) -> torch.Tensor:
        return self._weights.pop(self._prefix + name).to(self._device)

    def fused(self, *names: str) -> torch.Tensor:
        return torch.cat([self.must(name) for name in names])

    def fused_bias(self, *names: str) -> torch.Tensor | None:
        return self.fused(*names) if names[0] in self else None


def reorder(weight: torch.Tensor, heads: int, *sizes: int) -> list[torch.Tensor]:
    """The parts of each head, sorted by part: of rows [heads * sum(sizes), ...], tensors [heads * size, ...]."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (heads, -1)).split(sizes, dim=1)]
