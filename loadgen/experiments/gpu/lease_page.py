"""The page of a lease: targets beside figures, the parts with their ends, what failed, and all figures.

It needs nothing but Python, because it is written in any case.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

# Cases of `ramet bench bicache`.
NO_CACHE, BICACHE = "no cache", "BiCache"
_BATCHES = (1, 32, 128)
# Weights of `loadgen.experiments.gpu.products`, and the relative errors up to which the runtime uses their products.
_PRODUCTS = {"int4, groups of 32": 0.02, "int4, groups of 128": 0.02, "float8": 0.06, "experts, bfloat16": 0.02}
# Most kernels of a step that are shown, and most characters of their names.
_KERNELS, _NAME = 8, 100

Row = tuple[str, str, str, str]


def page(whole: dict[str, Any]) -> str:
    """Markdown, of the contents of `lease.json`."""
    found = _Found(whole["parts"])
    ends = [
        (name, str(part["rc"]), f"{part['seconds']:.0f}", _escaped(part["error"]))
        for name, part in whole["parts"].items()
    ]
    gpu = whole["gpu"] or "No GPU: a rehearsal, whose figures mean nothing."
    text = f"# `loadgen.experiments.gpu.lease`\n\n{gpu}\n\n"
    text += "## Targets\n\n" + _table(("what", "goal", "found", "met"), list(_targets(found)))
    text += "\n## Parts\n\n" + _table(("part", "exit status", "seconds", "error"), ends)
    for title, columns, rows in (
        ("Failed", ("part", "cell", "error"), found.failed()),
        ("Kernels of a step", ("step", "microseconds", "count", "kernel"), found.kernels()),
        ("Said", ("cell", "line"), found.said()),
    ):
        if lines := list(rows):
            text += f"\n## {title}\n\n" + _table(columns, lines)
    return text + "\n## Figures\n\nMedians; times in seconds.\n\n" + _table(("part", "cell", "figures"), found.rows())


class _Found:
    """The measurements of all parts of benches, whichever process ran them."""

    def __init__(self, parts: dict[str, dict[str, Any]]):
        self._cells: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._failed: list[tuple[str, dict[str, Any], str]] = []
        for name, part in parts.items():
            last = {repr(line["cell"]): line for line in part["lines"] if "cell" in line}
            for one in last.values():
                of = one["cell"].get("part", name)
                if "figures" in one:
                    self._cells.append((of, one["cell"], one["figures"]))
                else:
                    self._failed.append((of, one["cell"], one["error"]))

    def values(self, figure: str, part: str, **cell: Any) -> list[float]:
        """A figure of all cells of a part with these coordinates; only a NaN if one of them failed."""
        if any(of == part and cell.items() <= one.items() for of, one, _ in self._failed):
            return [math.nan]
        found = (figures for of, one, figures in self._cells if of == part and cell.items() <= one.items())
        return [_middle(figures[figure]) for figures in found if figure in figures]

    def value(self, figure: str, part: str, **cell: Any) -> float | None:
        """A figure of one cell; None: it was not measured, NaN: it failed."""
        return next(iter(self.values(figure, part, **cell)), None)

    def failures(self) -> Iterator[tuple[str, int, int]]:
        """Parts with failed cells: how many of how many."""
        failed = Counter(part for part, _, _ in self._failed)
        measured = Counter(part for part, _, _ in self._cells)
        for part, count in failed.items():
            yield part, count, count + measured[part]

    def failed(self) -> Iterator[tuple[str, str, str]]:
        for part, cell, error in self._failed:
            yield part, _named(cell), _escaped(error)

    def kernels(self) -> Iterator[tuple[str, str, str, str]]:
        """The longest ones."""
        for _, cell, figures in self._cells:
            for one in figures.get("kernels", [])[:_KERNELS]:
                yield cell["steps"], f"{one['us']:.1f}", f"{one['count']:.3g}", _escaped(one["name"])[:_NAME]

    def said(self) -> Iterator[tuple[str, str]]:
        """Warnings and hints."""
        for _, cell, figures in self._cells:
            for line in figures.get("lines", ()):
                yield _named(cell), _escaped(line)

    def rows(self) -> list[tuple[str, str, str]]:
        return [
            (part, _named(cell), ", ".join(f"{name} {_number(value)}" for name, value in _numbers(figures)))
            for part, cell, figures in self._cells
        ]


def _targets(found: _Found) -> Iterator[Row]:
    """What, goal, figure, and whether the goal is met."""
    for part, failed, cells in found.failures():
        yield f"{part}: {failed} of {cells} cells", "none fails", "failed", "no"
    yield from _correct(found)
    for what, figure, factor in (("copy, TB/s", "copy", 1e-12), ("bfloat16 products, TFLOP/s", "product", 1e-12)):
        value = found.value(figure, "bounds")
        yield _row(what, "", None if value is None else value * factor, None, ".2f")
    for batch in _BATCHES:
        value = found.value("share", "decode", mode="default", requests=batch)
        what = f"decode, {batch} requests: share of the bandwidth's bound"
        yield _least(what, 0.7, value) if batch == 32 else _row(what, "", value, None, ".0%")
    for batch in _BATCHES:
        eager, graphs = (found.value("step", "decode", mode=mode, requests=batch) for mode in ("eager", "default"))
        yield _least(f"decode, {batch} requests: graphs over eager, times as fast", 1, _ratio(eager, graphs), ".2f")
    for kernels in ("fa2", "fa3"):
        rows = {"rows of a step": 2048}
        value = found.value("share", "prefill", kernels=kernels, **rows)
        yield _least(f"prefill of 4,096 by 2,048, {kernels}: share of the matrix bound", 0.5, value)
    yield _most("first token of 4,096 cached + 128: times its ideal share", 1.5, found.value("over", "first token"))
    for how, with_, without in (("", "default", "no cascade"), (", eager", "eager", "eager, no cascade")):
        cascade, own = (found.value("step", "shared prefix", mode=mode) for mode in (with_, without))
        what = f"32 requests on a prefix of 4,096{how}: cascade over plain, times as fast"
        yield _least(what, 1.3, _ratio(own, cascade), ".2f")
    yield from _products(found)
    yield from _user(found)
    plain, bicache = (found.value("seconds", "BiCache", case=case) for case in (NO_CACHE, BICACHE))
    yield _least("BiCache over no cache, times as fast (paper: 1.36 to 1.98)", 1.36, _ratio(plain, bicache), ".2f")


def _correct(found: _Found) -> Iterator[Row]:
    yield _most("attention: worst relative error", 0.01, max(found.values("error", "attention"), default=None), ".5f")
    yield _least("tokens as transformers, float32", 1, found.value("theirs", "tokens", engine="float32"))
    for what, figure in (("tokens as transformers", "theirs"), ("cached tokens as uncached", "warm")):
        value = min(found.values(figure, "families", dtype="float32"), default=None)
        yield _least(f"families in float32: {what}, fewest", 1, value)
    gap = max(found.values("gap", "families", kernels="flashinfer"), default=None)
    yield _most("families by FlashInfer: logits apart where tokens part from transformers'", 0.1, gap, ".4f")
    yield _least("tokens of pairs of engines, fewest", 1, min(found.values("same", "pairs"), default=None))


def _products(found: _Found) -> Iterator[Row]:
    for weights, most in _PRODUCTS.items():
        value = max(found.values("error", "products", weights=weights), default=None)
        yield _most(f"products, {weights}: worst relative error", most, value, ".4f")
        for rows in (1, 32, 2048):
            what = f"products, {weights}, rows {rows}: times as fast as bfloat16"
            value = found.value("faster", "products", weights=weights, rows=rows)
            if value is not None:
                yield _least(what, 1, value, ".2f") if rows == 1 else _row(what, "", value, None, ".2f")


def _user(found: _Found) -> Iterator[Row]:
    ready_s = found.value("ready", "user", asked="server")
    yield _row("user: seconds until the server was ready", "", ready_s, None, ".0f")
    for clients in (32, 64):
        for what, figure in (("tokens/s", "rate"), ("seconds to the first token, p99", "ttft_p99")):
            value = found.value(figure, "user", clients=clients)
            yield _row(f"user: {clients} clients, {what}", "", value, None, ".3g")


def _row(what: str, goal: str, value: float | None, met: bool | None, form: str) -> Row:
    if value is None:
        return what, goal, "", ""
    if math.isnan(value):
        return what, goal, "failed", "no"
    return what, goal, format(value, form), "" if met is None else "yes" if met else "no"


def _least(what: str, goal: float, value: float | None, form: str = ".0%") -> Row:
    return _row(what, f"at least {goal:{form}}", value, value is not None and value >= goal, form)


def _most(what: str, goal: float, value: float | None, form: str = ".2f") -> Row:
    return _row(what, f"at most {goal:{form}}", value, value is not None and value <= goal, form)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _middle(value: Any) -> float:
    return float(median(value)) if isinstance(value, list) else float(value)


def _numbers(figures: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All but tables and lines, which have sections of their own."""
    for name, value in figures.items():
        if not isinstance(value, list) or (value and not isinstance(value[0], dict | str)):
            yield name, value


def _number(value: Any) -> str:
    return f"{_middle(value):.4g}" if isinstance(value, int | float | list) else str(value)


def _named(cell: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cell.items() if name != "part")


def _escaped(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:300]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
