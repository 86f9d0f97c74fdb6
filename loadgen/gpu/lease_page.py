"""The page of a lease: targets beside figures, the parts with their ends, what failed, and all figures.

It needs nothing but Python, because it is written in any case.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

# Cases of `ramet bench bicache`.
NO_CACHE, BICACHE = "no cache", "BiCache"
_BATCHES = (1, 32, 128)


def page(whole: dict[str, Any]) -> str:
    """Markdown, of the contents of `lease.json`."""
    found = _Found(whole["parts"])
    parts = whole["parts"]
    ends = [
        (name, str(part["rc"]), f"{part['seconds']:.0f}", _escaped(part["error"])) for name, part in parts.items()
    ]  # fmt: skip
    text = f"# `loadgen.gpu.lease`\n\n{whole['gpu'] or 'No GPU: a rehearsal, whose figures mean nothing.'}\n\n"
    text += "## Targets\n\n" + _table(("what", "goal", "found", "met"), list(_targets(found)))
    text += "\n## Parts\n\n" + _table(("part", "exit status", "seconds", "error"), ends)
    if failed := list(found.failed()):
        text += "\n## Failed\n\n" + _table(("part", "cell", "error"), failed)
    return text + "\n## Figures\n\nMedians; times in seconds.\n\n" + _table(("part", "cell", "figures"), found.rows())


class _Found:
    """The measurements of all parts."""

    def __init__(self, parts: dict[str, dict[str, Any]]):
        self._cells: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        self._failed: list[tuple[str, dict[str, Any], str]] = []
        for name, part in parts.items():
            last = {repr(line["cell"]): line for line in part["lines"] if "cell" in line}
            self._cells[name] = [(one["cell"], one["figures"]) for one in last.values() if "figures" in one]
            self._failed += [(name, one["cell"], one["error"]) for one in last.values() if "error" in one]

    def values(self, figure: str, part: str, **cell: Any) -> list[float]:
        """A figure of all cells of a part with these coordinates."""
        found = (figures for one, figures in self._cells.get(part, ()) if cell.items() <= one.items())
        return [_middle(figures[figure]) for figures in found if figure in figures]

    def value(self, figure: str, part: str, **cell: Any) -> float | None:
        """A figure of one cell; None: it was not measured."""
        return next(iter(self.values(figure, part, **cell)), None)

    def failed(self) -> Iterator[tuple[str, str, str]]:
        for part, cell, error in self._failed:
            yield part, _named(cell), _escaped(error)

    def rows(self) -> list[tuple[str, str, str]]:
        return [
            (part, _named(cell), ", ".join(f"{name} {_number(value)}" for name, value in figures.items()))
            for part, cells in self._cells.items()
            for cell, figures in cells
        ]


def _targets(found: _Found) -> Iterator[tuple[str, str, str, str]]:
    """What, goal, figure, and whether the goal is met."""

    def row(what: str, goal: str, value: float | None, met: bool | None, form: str) -> tuple[str, str, str, str]:
        if value is None:
            return what, goal, "", ""
        return what, goal, format(value, form), "" if met is None else "yes" if met else "no"

    def least(what: str, goal: float, value: float | None, form: str = ".0%") -> tuple[str, str, str, str]:
        return row(what, f"at least {goal:{form}}", value, value is not None and value >= goal, form)

    def most(what: str, goal: float, value: float | None, form: str = ".2f") -> tuple[str, str, str, str]:
        return row(what, f"at most {goal:{form}}", value, value is not None and value <= goal, form)

    yield most("attention: worst relative error", 0.01, max(found.values("error", "attention"), default=None), ".5f")
    yield least("tokens as transformers, float32", 1, found.value("theirs", "tokens", engine="float32"))
    yield least("tokens of pairs of engines, fewest", 1, min(found.values("same", "pairs"), default=None))
    for what, figure, factor in (("copy, TB/s", "copy", 1e-12), ("bfloat16 products, TFLOP/s", "product", 1e-12)):
        value = found.value(figure, "bounds")
        yield row(what, "", None if value is None else value * factor, None, ".2f")
    for batch in _BATCHES:
        value = found.value("share", "decode", mode="default", requests=batch)
        what = f"decode, {batch} requests: share of the bandwidth's bound"
        yield least(what, 0.7, value) if batch == 32 else row(what, "", value, None, ".0%")
    for batch in _BATCHES:
        eager, graphs = (found.value("step", "decode", mode=mode, requests=batch) for mode in ("eager", "default"))
        yield least(f"decode, {batch} requests: graphs over eager, times as fast", 1, _ratio(eager, graphs), ".2f")
    for kernels in ("fa2", "fa3"):
        value = found.value("share", "prefill", kernels=kernels)
        yield least(f"prefill of 4,096 by 2,048, {kernels}: share of the matrix bound", 0.5, value)
    yield most("first token of 4,096 cached + 128: times its ideal share", 1.5, found.value("over", "first token"))
    for how, with_, without in (("", "default", "no cascade"), (", eager", "eager", "eager, no cascade")):
        cascade, own = (found.value("step", "shared prefix", mode=mode) for mode in (with_, without))
        what = f"32 requests on a prefix of 4,096{how}: cascade over plain, times as fast"
        yield least(what, 1.3, _ratio(own, cascade), ".2f")
    plain, bicache = (found.value("seconds", "BiCache", case=case) for case in (NO_CACHE, BICACHE))
    yield least("BiCache over no cache, times as fast (paper: 1.36 to 1.98)", 1.36, _ratio(plain, bicache), ".2f")


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _middle(value: Any) -> float:
    return float(median(value)) if isinstance(value, list) else float(value)


def _number(value: Any) -> str:
    return f"{_middle(value):.4g}" if isinstance(value, int | float | list) else str(value)


def _named(cell: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items() if name != "part")


def _escaped(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:300]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
