"""The loop of the engine's process."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.process import _serve
from runtime.protocol import Ping, encode


class _Stepped(Exception):
    pass


class _Busy:
    """A core with something to compute, which ends the loop when it does."""

    idle_s, busy = None, True

    def __init__(self) -> None:
        self.counters = {"steps": 0}
        self.handled = 0

    def handle(self, message: object) -> None:
        self.handled += 1
        assert self.handled < 1_000_000, "messages keep a step from running"

    def take_replies(self) -> list[Any]:
        return []

    def publish(self) -> None:
        pass

    def step(self) -> list[Any]:
        raise _Stepped


class _Flood:
    """A socket that always has a message."""

    message = encode(Ping(1))

    def poll(self, wait_ms: int) -> bool:
        return True

    def recv(self) -> bytes:
        return self.message


def test_messages_without_end_let_steps_run():
    core: Any = _Busy()
    flood: Any = _Flood()
    with pytest.raises(_Stepped):
        _serve(core, flood, flood)
    assert core.handled
