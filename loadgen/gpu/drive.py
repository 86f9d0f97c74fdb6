"""A drive that shows the host's share of a step, and with which parts of the executor can be changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.micro.drive import Drive


class WatchedDrive(Drive):
    """A drive whose host time is counted.

    Attributes:
        host_s: seconds of the host since `watch`, by the part of a step.
    """

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self.host_s: dict[str, float] = {}

    @contextmanager
    def without(self, **attributes: Any) -> Iterator[None]:
        """Other attributes of the executor, while entered."""
        executor = self.core.executor
        kept = {name: getattr(executor, name) for name in attributes}
        try:
            for name, value in attributes.items():
                setattr(executor, name, value)
            yield
        finally:
            for name, value in kept.items():
                setattr(executor, name, value)

    def watch(self) -> None:
        """Count the host's seconds in scheduling, planning, launching, sampling and booking from now on."""
        core = self.core
        for where, name, shown in (
            (core.scheduler, "schedule", "schedule"), (core.scheduler, "follow", "schedule"),
            (core.planner, "plan", "plan"),
            (core.executor, "run", "launch"), (core.decoding, "choose", "sample"), (core, "_book", "book"),
        ):  # fmt: skip
            if not hasattr(getattr(where, name), "watched"):
                setattr(where, name, self._timed(getattr(where, name), shown))
        self.host_s = {}

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.host_s[name] = self.host_s.get(name, 0.0) + time.perf_counter() - started

        timed.watched = True  # type: ignore[attr-defined]
        return timed
