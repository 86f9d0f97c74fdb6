"""The measurements of a bench: recorded as JSON lines, read back, and summarised."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loadgen.harness.statistics import Estimate, StatisticName, compared, over_repeats

# Coordinates of a measurement by name: a row of the table. Values are text, numbers or booleans.
Cell = dict[str, Any]
Versus = Literal["ratio", "difference"]


class BenchError(Exception):
    """The bench cannot run; the message says why."""


@dataclass(frozen=True)
class Figure:
    """A column of the table.

    Attributes:
        name: of the value, or list of values, in what `measure` returns. Several columns may show the same one.
        title: of the column, with the unit.
        form: format of a number.
        factor: from the measured unit to that of the title.
        statistic: of the samples of a repeat; see `statistics.over_repeats`.
        versus: also show the ratio to, or the difference from, the cell of the bench's baseline.
        plotted: whether the plot shows it. Without any, the plot shows the first one.
        interval: whether the table shows its interval.
    """

    name: str
    title: str
    form: str = ".1f"
    factor: float = 1.0
    statistic: StatisticName = "median"
    versus: Versus | None = None
    plotted: bool = False
    interval: bool = True


@dataclass
class Results:
    """The measurements so far, by cell and repeat.

    Attributes:
        facts: name of the bench, its options, seed, start time and machine.
        figures: the columns of the table.
        sections: the coordinate whose values get a table each.
        base: the coordinate and value of the cells that others are compared with.
        path: file to which measurements are appended.
        measured: by the key of a cell: repeat -> what `measure` returned.
        cells: by key, in the order of the table.
        failed: by the key of a cell: the cell, and why its last measurement failed, unless a later one succeeded.
    """

    facts: dict[str, Any]
    figures: Sequence[Figure]
    sections: str | None = None
    base: tuple[str, Any] | None = None
    path: Path | None = None
    measured: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    failed: dict[str, tuple[Cell, str]] = field(default_factory=dict)

    def begin_file(self, resume: bool) -> None:
        """Create the file or, with `resume`, read it. Raises BenchError if it exists or has other options."""
        path = self.path
        if path is None:
            return
        if not path.exists() or not path.stat().st_size:
            _append(path, self.facts)
            return
        if not resume:
            raise BenchError(f"{path} exists; --resume goes on with it")
        other = read_facts(path)
        if different := [name for name in ("options", "machine", "bench") if other[name] != self.facts[name]]:
            raise BenchError(f"{path} was measured with other {different[0]}: {other[different[0]]}")
        self.facts = other
        _drop_torn_line(path)
        self.read(path)

    def read(self, path: Path, **coordinates: Any) -> None:
        """Add a file's measurements, with further coordinates for its cells. Raises BenchError."""
        try:
            for line in path.read_text("utf-8").splitlines()[1:]:
                record = json.loads(line)
                cell = record["cell"] | coordinates
                if "error" in record:
                    self.failed[_key(cell)] = cell, record["error"]
                else:
                    self._keep(cell, record["repeat"], record["figures"])
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{path} is not the result of a bench: {error!r}") from None

    def has(self, cell: Cell, repeat: int) -> bool:
        """Whether a measurement is there."""
        return repeat in self.of(cell)

    def has_failed(self, cell: Cell) -> bool:
        """Whether the last measurement of a cell failed."""
        return _key(cell) in self.failed

    def of(self, cell: Cell) -> dict[int, dict[str, Any]]:
        """The measurements of a cell by repeat."""
        return self.measured.get(_key(cell), {})

    def add(self, cell: Cell, repeat: int, figures: dict[str, Any]) -> None:
        """Record a measurement."""
        self._keep(cell, repeat, figures)
        if self.path is not None:
            _append(self.path, {"cell": cell, "repeat": repeat, "figures": figures})

    def fail(self, cell: Cell, repeat: int, error: str) -> None:
        """Record why a measurement failed. It stays missing, so that `--resume` makes it again."""
        self.failed[_key(cell)] = cell, error
        if self.path is not None:
            _append(self.path, {"cell": cell, "repeat": repeat, "error": error})

    def _keep(self, cell: Cell, repeat: int, figures: dict[str, Any]) -> None:
        self.failed.pop(_key(cell), None)
        self.cells.setdefault(_key(cell), cell)
        self.measured.setdefault(_key(cell), {})[repeat] = figures

    def in_order(self, cells: Sequence[Cell]) -> None:
        """Sort the cells in the order of the bench."""
        keys = [_key(cell) for cell in cells]
        self.cells = {key: self.cells[key] for key in [*keys, *self.cells] if key in self.cells}

    def by_section(self) -> Iterator[tuple[Any, list[Cell]]]:
        """The cells by the value of the section coordinate; one section without a name if there is none."""
        name = self.sections
        for value in dict.fromkeys(cell.get(name) if name else None for cell in self.cells.values()):
            yield value, [cell for cell in self.cells.values() if not name or cell.get(name) == value]

    def samples(self, cell: Cell, name: str, repeats: Sequence[int] | None = None) -> list[list[float]]:
        """The values of a figure, a list for each repeat (default: all)."""
        found = self.of(cell)
        return [_as_list(found.get(repeat, {}).get(name)) for repeat in (sorted(found) if repeats is None else repeats)]

    def estimate(self, cell: Cell, figure: Figure) -> Estimate | None:
        """A cell's figure with its interval; None if it was not measured."""
        return over_repeats(self.samples(cell, figure.name), figure.statistic)

    def comparison(self, figure: Figure) -> Versus | None:
        """The form of a figure's comparison with the base; runs are compared by ratios by default."""
        if self.base is None:
            return None
        return figure.versus or ("ratio" if self.base[0] == "run" else None)

    def versus(self, cell: Cell, figure: Figure) -> Estimate | None:
        """A figure beside that of the baseline, in pairs of repeats; None for the baseline itself."""
        how, base = self.comparison(figure), self.base
        if how is None or base is None or cell.get(base[0]) in (None, base[1]):
            return None
        other = cell | {base[0]: base[1]}
        both = sorted(self.of(cell).keys() & self.of(other).keys())
        mine, theirs = (self.samples(one, figure.name, both) for one in (cell, other))
        return compared(mine, theirs, figure.statistic, how)


def read_facts(path: Path) -> dict[str, Any]:
    """The first line of a file of results. Raises BenchError."""
    try:
        with path.open(encoding="utf-8") as lines:
            facts: dict[str, Any] = json.loads(next(lines, ""))
        if not {"bench", "options", "seed", "machine", "started"} <= facts.keys():
            raise ValueError("facts are missing")
    except (ValueError, AttributeError, OSError) as error:
        raise BenchError(f"{path} is not the result of a bench: {error}") from None
    return facts


def _drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, which remains if the process died while writing."""
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _as_list(value: Any) -> list[float]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, default=str) + "\n")
