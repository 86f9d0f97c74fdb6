"""Layers with recurrent states in transformers' modelling code, over the pool of states.

A layer is called for one row after the other, with the state of the row's sequence. So a sequence has the same bits
wherever it is cut. Prompts take as long as the steps of their tokens.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig

from runtime.batch import StateRows
from runtime.kv.states import StatePool

# Methods of transformers' caches by which a layer reads its states.
_READS = {"get_conv_state", "get_recurrent_state"}
# The rows of the step that runs on this thread, and the pool of their states.
_step: ContextVar[tuple[Sequence[StateRows], StatePool]] = ContextVar("states")


class _Slot:
    """The states of one sequence, as a layer expects them of a cache; they are updated in place."""

    def __init__(self, conv: list[torch.Tensor], recurrent: list[torch.Tensor]):
        """Tensors [1, ...], by number of the state."""
        self._conv, self._recurrent = conv, recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._conv[state_idx] if state_idx < len(self._conv) else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._recurrent[state_idx] if state_idx < len(self._recurrent) else None

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        state = self._conv[state_idx]
        full = torch.cat((state.to(new.dtype), new), dim=-1)
        state.copy_(full[..., -state.shape[-1] :])
        return full

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return self._recurrent[state_idx].copy_(new)

    def has_previous_state(self, *_: Any) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class StatefulLayer:
    """Stands for the `forward` of a layer: as it was outside of steps, and row by row within them.

    Attributes:
        conv, recurrent: shapes of the layer's states, without the batch; known after a forward pass within `probing`.
        first: number of the layer's first tensor in the pool.
    """

    conv: list[tuple[int, ...]]
    recurrent: list[tuple[int, ...]]
    first: int

    def __init__(self, module: nn.Module, order: int):
        """`order`: place of the layer among those with states."""
        self._layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._forward, self._order = module.forward, order
        self._signature = inspect.signature(module.forward)
        self.cache: DynamicCache | None = None
        module.forward = self

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [*self.conv, *self.recurrent]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._signature.bind(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        x = given.pop(next(iter(self._signature.parameters)))
        if (step := _step.get(None)) is None:
            if self.cache is not None:
                given["cache"] = self.cache
            return self._forward(x, **given)
        rows, pool = step
        given |= {"attention_mask": None} if "attention_mask" in given else {}
        return torch.cat([part for one in rows for part in self._run(one, x, pool, given)], dim=1)

    def learn(self) -> None:
        """Take the shapes of the states from the cache of the probe."""
        assert self.cache is not None
        layer: Any = self.cache.layers[self._layer]
        self.conv, self.recurrent = (
            [tuple(state.shape[1:]) for state in states.values() if state is not None]
            for states in (layer.conv_states, layer.recurrent_states)
        )
        self.cache = None

    def _run(self, one: StateRows, x: torch.Tensor, pool: StatePool, given: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Outputs [1, 1, hidden] of the rows of a sequence; see `StateRows`."""
        records, tensors = pool.records[self._order], pool.tensors[self.first : self.first + len(self.shapes)]
        state, saves = [tensor[one.target][None] for tensor in tensors], dict(one.saves)

        def advance(row: torch.Tensor, state: list[torch.Tensor]) -> torch.Tensor:
            own = given | {"cache": _Slot(state[: len(self.conv)], state[len(self.conv) :])}
            return self._forward(row[None, None], **own)

        if one.target != one.slot:
            for tensor in tensors:
                tensor[one.target] = tensor[one.slot]
        for record in records[one.slot][: one.accepted]:
            advance(record.to(x.dtype), state)
        for row in range(one.first, one.stop - one.draft):
            yield advance(x[0, row], state)
            if row in saves:
                for tensor in tensors:
                    tensor[saves[row]] = tensor[one.target]
        guessed = [part.clone() for part in state] if one.draft else []
        for number, row in enumerate(range(one.stop - one.draft, one.stop)):
            records[one.target][number] = x[0, row]
            yield advance(x[0, row], guessed)


def stateful_layers(model: nn.Module) -> list[StatefulLayer]:
    """Let the layers of a model that keep states take them from the pool within `states_of`."""
    found = [module for module in model.modules() if hasattr(module, "layer_idx") and _reads_states(type(module))]
    return [StatefulLayer(module, order) for order, module in enumerate(found)]


def _reads_states(kind: type[nn.Module]) -> bool:
    functions = (inspect.unwrap(value) for value in vars(kind).values() if inspect.isfunction(value))
    return any(_READS.intersection(function.__code__.co_names) for function in functions)


@contextmanager
def probing(layers: Sequence[StatefulLayer], settings: PretrainedConfig) -> Iterator[None]:
    """Within, a forward pass shows the shapes of the states."""
    cache = DynamicCache(config=settings)
    for layer in layers:
        layer.cache = cache
    yield
    total = 0
    for layer in layers:
        layer.learn()
        layer.first, total = total, total + len(layer.shapes)


@contextmanager
def states_of(rows: Sequence[StateRows], pool: StatePool | None) -> Iterator[None]:
    """Within, layers compute rows with the states of their sequences. Without a pool, nothing changes."""
    if pool is None:
        yield
        return
    token = _step.set((rows, pool))
    try:
        yield
    finally:
        _step.reset(token)
