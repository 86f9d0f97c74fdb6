"""The interface of a bench: its options, its cells, and the measurement of a cell."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from rich.console import RenderableType

from loadgen.harness.options import NewFile
from loadgen.harness.results import Cell, Figure, Results


def repeats_of(default: int) -> Any:
    """The field `repeats` with another default."""
    return Field(default, ge=1, description="measurements of each cell, with fresh inputs")


def warmup_of(default: int) -> Any:
    """The field `warmup` with another default."""
    return Field(default, ge=0, description="uncounted rounds over all cells before the measurements")


class Bench(BaseModel, ABC):
    """A bench. The fields of a subclass are its options; a field's description is its help text.

    The harness measures all cells in alternation: a round takes every cell once, and every other round takes them
    backwards, so that a drift of the machine affects all of them alike.

    Attributes:
        figures: the columns of the table, behind the coordinates.
        sections: the coordinate whose values get a table each; None: one table.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    figures: ClassVar[tuple[Figure, ...]]
    sections: ClassVar[str | None] = None

    repeats: int = repeats_of(5)
    warmup: int = warmup_of(1)
    seed: int | None = Field(None, ge=0, description="seed of all random inputs (default: a new one in each run)")
    json_: NewFile | None = Field(None, description="write every measurement as it is made (JSON lines)")
    resume: bool = Field(False, description="continue the file of --json and measure only what it lacks")
    guard: bool = Field(
        False, description="for a process that may die: note each cell as failed before it is measured, and try it once"
    )
    only: tuple[str, ...] = Field((), description="of cells that have a NAME, only those with one of these NAME=VALUE")
    limit: float | None = Field(None, ge=0, description="seconds after which no measurement begins")
    markdown: NewFile | None = Field(None, description="write a result page")
    plot: NewFile | None = Field(None, description="write the plot (PNG or SVG)")

    @contextmanager
    def session(self) -> Iterator[None]:
        """Entered around all measurements: start and close servers and engines here."""
        yield

    @abstractmethod
    def cells(self) -> Iterable[Cell]:
        """The cells, in the order of the table. Called within the session."""

    @abstractmethod
    def measure(self, cell: Cell, draw: random.Random) -> Mapping[str, Any]:
        """Measure a cell once.

        Args:
            cell: one of `cells`.
            draw: random numbers; all cells of a round get the same ones, so that they can be compared in pairs.

        Returns:
            Values, or lists of samples, by the names of `figures`. Other JSON values are recorded, but not shown.
        """

    def baseline(self) -> tuple[str, Any] | None:
        """The coordinate and value of the cells that others are compared with; None: no comparison."""
        return None

    def details(self, results: Results) -> Iterable[RenderableType]:
        """Further output for the terminal, before the tables."""
        return ()

    def draw_plot(self, results: Results, path: Path) -> bool:
        """Write a plot in place of the default one. Returns whether it did."""
        return False

    def lost(self) -> bool:
        """Whether a failed measurement has left this process unable to measure another cell."""
        return False

    def exit_code(self, results: Results) -> int:
        """The exit code after a complete run."""
        return 0


COMMON = tuple(Bench.model_fields)
