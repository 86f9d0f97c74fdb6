"""The engine's loop."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.calls import Ping
from runtime.engine.loop import EngineLoop
from runtime.engine.part import Parts
from runtime.protocol import Ask, encode


class _Stepped(Exception):
    pass


class _Busy:
    """A core with something to compute, which ends the loop when it does."""

    parts, busy = Parts(), True

    def __init__(self) -> None:
        self.counters = {"steps": 0}
        self.handled = 0

    def handle(self, message: object) -> list[Any]:
        self.handled += 1
        assert self.handled < 1_000_000, "messages keep a step from running"
        return []

    def settle(self) -> list[Any]:
        return []

    def step(self) -> list[Any]:
        raise _Stepped


class _Flood:
    """A socket that always has a message."""

    message = encode(Ask(1, Ping()))

    def poll(self, wait_ms: int) -> bool:
        return True

    def recv(self, flags: int) -> bytes:
        return self.message


def test_messages_without_end_let_steps_run():
    core: Any = _Busy()
    flood: Any = _Flood()
    with pytest.raises(_Stepped):
        EngineLoop(flood, flood)._serve(core)
    assert core.handled
