"""Tables for the terminal and for Markdown, and result pages."""

import inspect
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadgen.harness.bench import Bench
from loadgen.harness.machine import machine_text
from loadgen.harness.options import flag
from loadgen.harness.results import Cell, Results
from loadgen.harness.statistics import shown

_FILES = ("json_", "markdown", "plot")


def wide_console() -> Console:
    """The terminal; for a file or a pipe, a console wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]] = (), left: int = 1) -> Table:
    """A table whose first `left` columns are names, and whose others are figures, aligned to the right."""
    table = Table(title=title or None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """The table as lines of Markdown."""
    rule = ["---" if number < left else "---:" for number in range(len(columns))]
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in [columns, rule, *rows]
    )


def terminal_tables(results: Results) -> list[Table]:
    """The tables, one for each section, and one of the cells that failed."""
    tables = [make_table(title, columns, rows, left) for title, columns, rows, left in _sections(results)]
    if results.failed:
        tables.append(make_table("failed", ("cell", "error"), _failures(results), 2))
    return tables


def markdown_tables(results: Results) -> str:
    """The tables in Markdown, each below its section's title."""
    parts = []
    for title, columns, rows, left in _sections(results):
        parts.append((f"**{title}**\n\n" if title else "") + markdown_table(columns, rows, left))
    if results.failed:
        parts.append("**failed**\n\n" + markdown_table(("cell", "error"), _failures(results), 2))
    return "\n".join(parts)


def page(bench: Bench, results: Results) -> str:
    """A result page: date, machine, command, tables, plot. The reader's findings go below it."""
    facts = results.facts
    title, _, more = (inspect.getdoc(bench.__class__) or facts["bench"]).partition("\n")
    parts = [
        f"# `ramet bench {facts['bench']}`\n",
        f"{title.rstrip('.')}. {facts['started'][:10]}; {machine_text(facts['machine'])}.\n",
    ]
    if more:
        parts.append(f"{more.strip()}\n")
    parts += [
        f"```sh\n{command(facts['bench'], bench)}\n```\n",
        f"Median of {max(map(len, results.measured.values()), default=0)} [95 % bootstrap interval]:\n",
        markdown_tables(results),
    ]
    if bench.plot is not None and bench.markdown is not None:
        parts.append(f"![plot]({os.path.relpath(bench.plot, bench.markdown.parent)})\n")
    return "\n".join(parts)


def command(name: str, bench: Bench) -> str:
    """The command that repeats the measurement: the options that are not their defaults."""
    parts = ["ramet", "bench", name]
    for name, value in bench.model_dump(exclude_defaults=True).items():
        if name in _FILES:
            continue
        if isinstance(value, bool):
            parts.append(flag(name) if value else f"--no-{flag(name)[2:]}")
        else:
            parts += [flag(name), *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return shlex.join(parts)


def _failures(results: Results) -> list[tuple[str, str]]:
    """Cell and error of what failed; a `|` would end a column."""
    return [
        (", ".join(f"{name} {_text(value)}" for name, value in cell.items()), error.replace("|", "/"))
        for cell, error in results.failed.values()
    ]


def _sections(results: Results) -> Iterator[tuple[str, list[str], list[list[str]], int]]:
    """Title, columns, rows and number of coordinates of each table. Columns without any value are left out."""
    for section, cells in results.by_section():
        names = list(dict.fromkeys(name for cell in cells for name in cell if name != results.sections))
        columns = [(name, [_text(cell.get(name)) for cell in cells]) for name in names]
        columns += _figures(results, cells)
        rows = [list(row) for row in zip(*(values for _, values in columns), strict=True)]
        yield _text(section), [column for column, _ in columns], rows, len(names)


def _figures(results: Results, cells: list[Cell]) -> list[tuple[str, list[str]]]:
    base = results.base
    found: list[tuple[str, list[str]]] = []
    for figure in results.figures:
        estimates = [results.estimate(cell, figure) for cell in cells]
        values = [shown(one, figure.form, figure.factor, figure.interval) for one in estimates]
        if any(values):
            found.append((figure.title, values))
        beside = [results.versus(cell, figure) for cell in cells]
        if base is not None and any(one is not None for one in beside):
            is_ratio = results.comparison(figure) == "ratio"
            form, factor = (".2f", 1.0) if is_ratio else (f"+{figure.form}", figure.factor)
            name = base[1] if isinstance(base[1], str) else f"{base[0]} {base[1]}"
            title = f"{'times' if is_ratio else 'more than'} {name}"
            found.append((title, [shown(one, form, factor) for one in beside]))
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
