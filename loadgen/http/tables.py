"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def wide_console() -> Console:
    """The terminal; for a file or a pipe, a console wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]] = (), left: int = 1) -> Table:
    """A table whose first `left` columns are names, and whose others are figures, aligned to the right."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as lines of Markdown, the last with its end."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)
