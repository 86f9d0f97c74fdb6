"""Recurrent layers for the kernels (`src/recurrence.h`)."""

from collections.abc import Callable

import torch

from runtime.batch import MOST_DRAFTED
from runtime.execution.mixers.delta_net import DeltaNet
from runtime.execution.mixers.mixer import Mixer
from runtime.execution.mixers.recurrent import Recurrent
from runtime.execution.native import library as c
from runtime.kv.states import StatePool
from runtime.models.recurrence import DeltaSpec, RecurrenceSpec


def describe_recurrence(spec: RecurrenceSpec) -> c.RecurrenceShape:
    shape = c.RecurrenceShape(
        kind=c.SHORT_CONV,
        channels=spec.channels,
        width=spec.width,
        record=spec.record,
        most_drafted=MOST_DRAFTED,
    )
    if isinstance(spec, DeltaSpec):
        shape.kind, shape.is_tiled = c.DELTA_NET, spec.tiled
        for name in ("k_heads", "v_heads", "k_dim", "v_dim"):
            setattr(shape, name, getattr(spec, name))
    return shape


def layer_state(mixer: Mixer, pool: StatePool, keep: Callable[[torch.Tensor], int]) -> c.LayerState:
    """Vectors and states of a layer. `keep`: returns the address of a tensor that is kept as long as the weights."""
    assert isinstance(mixer, Recurrent)
    tensors = mixer.tensors_in(pool)
    state = c.LayerState(
        taps=keep(mixer.taps),
        tap_bias=None if mixer.tap_bias is None else keep(mixer.tap_bias),
        tail=tensors[0].data_ptr(),
        records=pool.records[mixer.order].data_ptr(),
    )
    if isinstance(mixer, DeltaNet):
        state.rate, state.dt_bias, state.norm = keep(mixer.rate), keep(mixer.dt_bias), keep(mixer.norm)
        state.matrix = tensors[1].data_ptr()
    return state
