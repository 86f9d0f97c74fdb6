"""The engine's loop."""

from typing import Any

import pytest
import zmq

from runtime.calls import Ping
from runtime.engine.loop import _NOTHING_TO_RUN_MS, EngineLoop
from runtime.engine.part import Parts
from runtime.protocol import Ask, encode


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


class _Flood:
    """A socket that always has a message."""

    message = encode(Ask(1, Ping()))

    def poll(self, wait_ms: int) -> bool:
        return True

    def recv(self, flags: int) -> bytes:
        return self.message


class _Silent:
    """A socket without messages; `waits`: the times in milliseconds for which it was polled."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def poll(self, wait_ms: int) -> None:
        self.waits.append(wait_ms)

    def recv(self, flags: int) -> bytes:
        raise zmq.Again


def test_the_loop_waits_only_behind_steps_in_which_nothing_ran():
    """Requests may all wait for a grammar or a tier."""
    core: Any = _Busy(False, False, True, True, False)
    silent: Any = _Silent()
    with pytest.raises(_Ended):
        EngineLoop(silent, silent)._serve(core)
    assert silent.waits == [_NOTHING_TO_RUN_MS] * 3


def test_messages_without_end_let_steps_run():
    core: Any = _Busy()
    flood: Any = _Flood()
    with pytest.raises(_Ended):
        EngineLoop(flood, flood)._serve(core)
    assert core.handled
