"""Checks whether the load generator itself is the bottleneck."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

_EVERY_S = 0.02
_TOO_LATE_S = 0.02
_TOO_BUSY = 0.8


class LagMeter:
    """A context that measures the lateness of the event loop and the CPU time of the process.

    All times of a run are taken in this loop, so its lateness bounds their error.
    """

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._busy = 0.0

    async def __aenter__(self) -> LagMeter:
        self._begin = (time.perf_counter(), time.process_time())
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        wall, cpu = self._begin
        self._busy = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)

    async def _watch(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_EVERY_S)
            self._late_s.append(max(time.perf_counter() - begin - _EVERY_S, 0.0))

    def result(self) -> dict[str, Any]:
        """Lateness in seconds, the client's share of one core, and a warning or None."""
        p50, p99, most = np.percentile(self._late_s or [0.0], (50, 99, 100)).tolist()
        warning = None
        if self._busy > _TOO_BUSY:
            warning = f"the client is the bottleneck: it took {self._busy:.0%} of a core; a faster one finds more"
        elif p99 > _TOO_LATE_S:
            warning = f"this machine was busy: the client ran {1000 * p99:.0f} ms late at p99; times are that uncertain"
        return {"lag_p50_s": p50, "lag_p99_s": p99, "lag_max_s": most, "cpu_share": self._busy, "warning": warning}
