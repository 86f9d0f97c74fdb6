"""A drive that shows the host's share of a step, and with which parts of the executor can be changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loadgen.micro.drive import ClockedDrive


class WatchedDrive(ClockedDrive):
    """A drive of which parts can be changed and clocked."""

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
        if not self._replaced:
            for where, name, shown in (
                (core.scheduler, "schedule", "schedule"), (core.scheduler, "follow", "schedule"),
                (core.planner, "plan", "plan"),
                (core.executor, "run", "launch"), (core.decoding, "choose", "sample"), (core, "_book", "book"),
            ):  # fmt: skip
                self.clock(where, name, shown)
        self.reset()
