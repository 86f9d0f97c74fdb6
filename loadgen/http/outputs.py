"""The files that benchmarks write: their options, figures as JSON, tables in Markdown, plots."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.http.files import write_json

_HELP = {"markdown": "write the tables", "plot": "write the plot as PNG or SVG", "json": "write the figures"}


def new_file(text: str) -> Path:
    """The type of an option that names a file to write, refused before minutes of measurements."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        problem = f"{path} is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise argparse.ArgumentTypeError(problem)
    return path


def add_files(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *kinds: str, **told: str) -> None:
    """Add an option for each kind of file, of `markdown`, `plot` and `json`; `told`: help texts of some."""
    for kind, text in {**{kind: _HELP[kind] for kind in kinds}, **told}.items():
        parser.add_argument(f"--{kind}", type=new_file, metavar="FILE", help=text)


def write_files(
    arguments: argparse.Namespace,
    data: dict[str, Any],
    markdown: str | None = None,
    plot: Callable[[Path], object] | None = None,
) -> None:
    """Write the files that the options name."""
    if markdown is not None and (path := getattr(arguments, "markdown", None)) is not None:
        path.write_text(markdown, encoding="utf-8")
    if plot is not None and (path := getattr(arguments, "plot", None)) is not None:
        plot(path)
    if (path := getattr(arguments, "json", None)) is not None:
        write_json(path, data)


@contextmanager
def drawing(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """The axes of a figure of some inches, as `subplots` has them; the figure is saved at the end."""
    # Not pyplot, which has global state and wants a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(rows, columns, **options)
    figure.savefig(path, dpi=150)
