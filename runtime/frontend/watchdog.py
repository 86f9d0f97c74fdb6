"""A watchdog for an engine process that is frozen, or hangs within a step."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("ramet.client")

# Number of checks within --step-timeout.
_TICKS = 10

# The engine is killed after this many times --step-timeout: compiling a GPU kernel at its first use takes minutes.
_KILLED_AFTER = 5


class Watchdog:
    """Pings the engine, which answers between its steps.

    The watchdog counts its own ticks instead of reading a clock: while this process is stopped or the machine is
    suspended, no tick passes, and on a busy machine ticks are late, like steps.

    Attributes:
        late: whether the engine has not finished a step for longer than --step-timeout.
    """

    def __init__(self, timeout_s: float):
        self.late = False
        self._timeout_s = timeout_s

    async def watch(self, ask: Callable[[], Coroutine[Any, Any, object]], kill: Callable[[], None]) -> None:
        """Watch an engine until it ends; `kill` is called if a step takes too long."""
        self.late = False
        tick_s = self._timeout_s / _TICKS
        alive = True
        while alive and tick_s:
            await asyncio.sleep(tick_s)
            answer = asyncio.create_task(ask())
            try:
                ticks = 0
                while not (await asyncio.wait((answer,), timeout=tick_s))[0]:
                    ticks += 1
                    self._judge(ticks, kill)
                alive = answer.exception() is None
            finally:
                answer.cancel()
            if self.late and alive:
                self.late = False
                log.warning("the engine answers again")

    def _judge(self, ticks: int, kill: Callable[[], None]) -> None:
        if ticks == _TICKS:
            self.late = True
            log.warning("the engine has not finished a step for %g s: /ready answers 503", self._timeout_s)
        if ticks == _TICKS * _KILLED_AFTER:
            log.error("the engine has not finished a step for %g s and is killed", self._timeout_s * _KILLED_AFTER)
            kill()
