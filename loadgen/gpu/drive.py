"""A drive that shows the host's share of a step, and with which parts of the executor can be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from loadgen.gpu.figures import Figures
from loadgen.micro.drive import ClockedDrive, Drive
from runtime.engine.offline import Engine

D = TypeVar("D", bound="Drive | Engine")


class OneAtATime(Generic[D]):
    """Opens an engine when a figure needs it, in place of one with other options: a GPU has room for one."""

    def __init__(self, opening: Callable[..., D]):
        self._opening = opening
        self._open: D | None = None
        self._options: dict[str, Any] = {}

    def call(self, measuring: Callable[[D], Figures], **options: Any) -> Figures:
        """Measure with the engine of these options."""
        if self._open is None or self._options != options:
            self.close()
            self._open, self._options = self._opening(**options), options
        return measuring(self._open)

    def close(self) -> None:
        """Close the engine, if one is open."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()


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
