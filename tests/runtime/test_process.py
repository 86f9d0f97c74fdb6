"""The engine's loop."""

from typing import Any

import pytest
import torch

from runtime.calls import Ping
from runtime.engine.loop import _NOTHING_TO_RUN_MS, EngineLoop
from runtime.engine.part import Parts
from runtime.kv.pool import zeros
from runtime.protocol import CallEngine, Failed


class _Ended(Exception):
    pass


class _Busy:
    """A core with requests, whose steps run or do not, as given; the step behind them ends the loop."""

    parts, busy = Parts(), True

    def __init__(self, *runs: bool) -> None:
        self.runs = list(runs)
        self.counters = {"steps": 0}
        self.handled = 0

    def handle(self, message: object) -> list[Any]:
        self.handled += 1
        assert self.handled < 1_000_000, "messages keep a step from running"
        return []

    def settle(self) -> list[Any]:
        return []

    def step(self) -> list[Any]:
        if not self.runs:
            raise _Ended
        self.counters["steps"] += self.runs.pop(0)
        return []


@pytest.mark.parametrize(
    "error", [None, RuntimeError("unable to mmap 2 bytes from file <x>: Cannot allocate memory (12)")]
)
def test_a_start_without_memory_is_one_sentence(error):
    """As a limit of the address space makes it, wherever it ends."""
    said: list[Any] = []

    def open_core():
        if error is not None:
            raise error
        zeros((1 << 50,), torch.uint8, torch.device("cpu"))

    assert EngineLoop(lambda wait_ms: None, said.append).run(open_core, print) == 1
    assert [type(message) for message in said] == [Failed]
    assert "does not fit into the memory" in said[0].message


def test_the_loop_waits_only_behind_steps_in_which_nothing_ran():
    """Requests may all wait for a grammar or a tier."""
    core: Any = _Busy(False, False, True, True, False)
    waits: list[int | None] = []
    with pytest.raises(_Ended):
        EngineLoop(waits.append, print)._serve(core)
    assert [wait for wait in waits if wait] == [_NOTHING_TO_RUN_MS] * 3


def test_messages_without_end_let_steps_run():
    core: Any = _Busy()
    with pytest.raises(_Ended):
        EngineLoop(lambda wait_ms: CallEngine(1, Ping()), print)._serve(core)
    assert core.handled
