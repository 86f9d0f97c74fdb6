"""The plot of a bench, by matplotlib."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen.harness.results import Cell, Figure, Results

_WIDEST = 4  # panels in a row


@contextmanager
def drawing(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """A context with the axes of a new figure; `size` in inches. The figure is saved at the end."""
    # pyplot is avoided, because it has global state and needs a display.
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=size, layout="constrained")
    yield canvas.subplots(rows, columns, **options)
    canvas.savefig(path, dpi=150)


def default_plot(results: Results, path: Path) -> None:
    """A panel for each section and plotted figure: lines over the first coordinate of numbers, or else bars.

    If none of the plotted figures was measured, the first measured one is shown.
    """
    every = results.cells.values()
    known = [figure for figure in results.figures if any(results.estimate(cell, figure) for cell in every)]
    chosen = [figure for figure in known if figure.plotted] or known[:1]
    panels = [
        (title, cells, figure)
        for title, cells in results.by_section()
        for figure in chosen
        if any(results.estimate(cell, figure) for cell in cells)
    ]
    columns = min(len(panels), _WIDEST)
    rows = -(-len(panels) // columns)
    with drawing(path, (4.8 * columns + 1, 3.6 * rows), rows, columns, squeeze=False) as axes:
        for one, (title, cells, figure) in zip(axes.flat, panels, strict=False):
            x = _numeric(cells)
            if x is None:
                _bars(one, results, cells, figure)
            else:
                _lines(one, results, cells, figure, x)
            one.set_title(str(title or ""), fontsize=9)
            one.grid(alpha=0.3)
        for unused in axes.flat[len(panels) :]:
            unused.axis("off")


def _numeric(cells: list[Cell]) -> str | None:
    """The first coordinate that has several numbers."""
    for name in cells[0]:
        values = {cell.get(name) for cell in cells}
        if len(values) > 1 and all(isinstance(value, (int, float)) and value is not True for value in values):
            return name
    return None


def _lines(axes: Any, results: Results, cells: list[Cell], figure: Figure, x: str) -> None:
    lines: dict[str, list[tuple[float, ...]]] = {}
    for cell in cells:
        if (found := results.estimate(cell, figure)) is not None:
            lines.setdefault(_label(results, cells, cell, x), []).append((cell[x], *found))
    for label, points in lines.items():
        at, middle, low, high = zip(*sorted(points), strict=True)
        y = [figure.factor * value for value in middle]
        errors = [[figure.factor * abs(a - b) for a, b in zip(middle, ends, strict=True)] for ends in (low, high)]
        axes.errorbar(at, y, yerr=errors, marker="o", markersize=4, capsize=2, label=label)
    places = sorted({cell[x] for cell in cells})
    if places[0] > 0 and places[-1] / places[0] > 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=x, ylabel=figure.title)
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
    if list(lines) != [""]:
        axes.legend(fontsize=7)


def _bars(axes: Any, results: Results, cells: list[Cell], figure: Figure) -> None:
    found = [(_label(results, cells, cell, None), results.estimate(cell, figure)) for cell in cells]
    known = [(label, estimate) for label, estimate in found if estimate is not None]
    widths = [figure.factor * estimate[0] for _, estimate in known]
    errors = [[figure.factor * abs(estimate[0] - estimate[end]) for _, estimate in known] for end in (1, 2)]
    axes.barh([label for label, _ in known], widths, xerr=errors, capsize=2)
    axes.invert_yaxis()
    axes.set_xlabel(figure.title)


def _label(results: Results, cells: list[Cell], cell: Cell, x: str | None) -> str:
    """The coordinates in which cells differ, except the one on the x axis."""
    skip = {x, results.sections}
    names = [name for name in cell if name not in skip and len({str(other.get(name)) for other in cells}) > 1]
    return ", ".join(str(cell[name]) for name in names)
