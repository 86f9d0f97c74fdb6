"""Deadline: the time at which a request must have ended."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

from runtime.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline(NamedTuple):
    """A time limit.

    Attributes:
        timeout_s: seconds from the request's arrival to its end; None: no limit.
        at_s: its end on the clock of `time.monotonic`, which event loops have too.
    """

    timeout_s: float | None = None
    at_s: float | None = None

    @classmethod
    def after(cls, timeout_s: float | None, began_s: float | None = None) -> "Deadline":
        """The end of `timeout_s` seconds (None: no limit) that began at `began_s` (None: now)."""
        if timeout_s is None:
            return cls()
        return cls(timeout_s, (time.monotonic() if began_s is None else began_s) + timeout_s)

    @property
    def error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request took longer than its {self.timeout_s:g} seconds", param="timeout_s")

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Cancels it and raises DeadlineExceeded at the deadline."""
        try:
            async with asyncio.timeout_at(self.at_s):
                return await work
        except TimeoutError:
            raise self.error from None


NO_DEADLINE = Deadline()
