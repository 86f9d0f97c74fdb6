"""Sequences that are computed together give what the recurrence gives one by one, in few operations."""

import random

import pytest
import torch

from runtime.batch import MOST_DRAFTED, StateRows
from runtime.execution.mixers.delta_net import DeltaNet
from runtime.execution.mixers.mixer import MixedRows
from runtime.execution.mixers.recurrent import Recurrent
from runtime.execution.mixers.state_plan import CHUNK, plan_states
from runtime.kv.states import StatePool
from tests.runtime.execution.counting import Operations
from tests.runtime.execution.mixers.models import CPU, HYBRID_MODELS, Runner, save_hybrid

KINDS = {**{kind: {} for kind in HYBRID_MODELS}, "tiled": {}}


@pytest.fixture(scope="module", params=KINDS)
def mixer(request, tmp_path_factory):
    """The first recurrent layer of a model."""
    kind = "Qwen3_5" if request.param == "tiled" else request.param
    more = {"conv_bias": True} if kind == "Lfm2" else {}
    model = Runner(save_hybrid(kind, tmp_path_factory.mktemp("model"), **more)).model
    mixer = next(layer.mixer for layer in model.layers if isinstance(layer.mixer, Recurrent))
    if request.param == "tiled":
        object.__setattr__(mixer.spec, "tiled", True)
    return mixer


class World:
    """A layer with two pools of the same states: one for sequences together, one for sequences one by one."""

    def __init__(self, mixer: Recurrent, slots: int):
        self.mixer, draw = mixer, torch.Generator().manual_seed(1)
        self.pools = [StatePool(mixer.spec.states, slots, CPU, [mixer.spec.record]) for _ in range(2)]
        for one, other in zip(*(pool.tensors + pool.records for pool in self.pools), strict=True):
            other.copy_(one.normal_(generator=draw))

    def rows(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.mixer.inputs.shape[1], generator=torch.Generator().manual_seed(count))

    def both(self, x: torch.Tensor, states: list[StateRows]) -> list[torch.Tensor]:
        return [self.together(x, states), self.mixer.mix(x, MixedRows(None, None, (), states, self.pools[1]))]

    def together(self, x: torch.Tensor, states: list[StateRows]) -> torch.Tensor:
        plan = plan_states(states, self.mixer.spec.width, CPU)
        return self.mixer.mix(x, MixedRows(None, None, (), states, self.pools[0], True, plan))

    def check(self, x: torch.Tensor, states: list[StateRows]) -> None:
        results = [self.both(x, states), *zip(*(pool.tensors + pool.records for pool in self.pools), strict=True)]
        for found, wanted in results:
            if isinstance(self.mixer, DeltaNet):
                assert (found - wanted).norm() <= 1e-5 * wanted.norm()
                assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
            else:
                assert torch.equal(found, wanted)


def steps(draw: random.Random, sequences: int) -> list[StateRows]:
    """A step of sequences of any length, with any saves, guesses and replays."""
    slots, at, states = draw.sample(range(5 * sequences), 5 * sequences), 0, []
    for _ in range(sequences):
        count = draw.choice([1, 1, 2, 5, 17, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
        draft = draw.choice([0, 0, min(count, 3), min(count, MOST_DRAFTED)])
        slot, stop = slots.pop(), at + count
        ends = draw.sample(range(at, stop - draft), min(draw.choice([0, 0, 1, 3]), count - draft))
        saves = [(end, slots.pop()) for end in ends]
        target = draw.choice([slot, slots.pop()])
        states.append(StateRows(at, stop, slot, target, saves, draft, draw.choice([0, 0, 1, 7, MOST_DRAFTED])))
        at = stop
    return states


def test_any_step_is_the_recurrence(mixer):
    draw = random.Random(2)
    world = World(mixer, 5 * 6)
    for sequences in (1, 2, 3, 6, 6, 6):
        states = steps(draw, sequences)
        world.check(world.rows(states[-1].stop), states)


def test_keys_that_repeat(mixer):
    """With a series of powers in place of a solved system, their rounding errors would be larger than the states."""
    world = World(mixer, 2)
    world.check(world.rows(1).repeat(300, 1), [StateRows(0, 300, 0, 1)])


@pytest.mark.parametrize("rate", [0.0, 30.0])
def test_states_that_last_and_states_that_fade_at_once(mixer, monkeypatch, rate):
    if not isinstance(mixer, DeltaNet):
        pytest.skip("the state of a convolution does not fade")
    monkeypatch.setattr(mixer, "rate", torch.full_like(mixer.rate, rate))
    world = World(mixer, 2)
    world.check(world.rows(300), [StateRows(0, 300, 0, 1)])


def test_rows_without_numbers_leave_other_sequences_as_they_are(mixer):
    world = World(mixer, 6)
    x, states = world.rows(73), [StateRows(0, 70, 0, 0), StateRows(70, 72, 1, 2), StateRows(72, 73, 3, 4)]
    wanted = world.together(x, states)
    world = World(mixer, 6)
    x[:70] = torch.nan
    assert torch.equal(world.together(x, states)[70:], wanted[70:])


def test_operations_grow_with_neither_sequences_nor_rows(mixer):
    """A chunk of a prompt takes a few, whatever its rows."""

    def count(*lengths: int) -> int:
        world, at, states = World(mixer, 2 * len(lengths)), 0, []
        for number, length in enumerate(lengths):
            states.append(StateRows(at, at + length, 2 * number, 2 * number + 1))
            at += length
        x = world.rows(at)
        plan = plan_states(states, mixer.spec.width, CPU)
        with Operations() as operations:
            mixer.mix(x, MixedRows(None, None, (), states, world.pools[0], True, plan))
        return operations.count

    assert count(1, 1) == count(*[1] * 32) < 80
    assert count(CHUNK, CHUNK) == count(CHUNK - 1, 17) == count(*[CHUNK] * 4)
    assert count(32 * CHUNK) - count(CHUNK) <= 31 * 7
