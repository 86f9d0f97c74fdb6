"""`ramet bench bicache`: accuracy and cost of reusing a shared prefix in a diffusion model, as in BiCache's Table 1.

Everything that was measured stands in a file, so that a run that was ended goes on, and one with more samples, ratios
or sweeps runs only what is new.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadgen.quality.cases import Case, Plan, depth_cases, interval_cases, table_cases
from loadgen.quality.measure import Cell, Outcome, Records, Runner
from loadgen.quality.tasks import TASKS, Source
from loadgen.quality.vocabulary import Vocabulary
from loadgen.tables import wide_console
from runtime.errors import ModelError
from runtime.models.resolve import resolve_model

if TYPE_CHECKING:
    from runtime.engine import Engine

_MODEL = "smollm2-135m-diffusion"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("--out", type=Path, default=Path("bicache"), help="directory of records, table and plots")
    parser.add_argument("--model", default=_MODEL, help=f"a diffusion model adapted to the tasks (default: {_MODEL})")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--depth-table", type=Path, help="as of `ramet serve`; default: the model's own")
    parser.add_argument("--depth", type=int, help="layers that BiCache reuses at any ratio, instead of a table")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=["keep"], help="default: keep")
    parser.add_argument("--room", type=int, default=32, help="tokens of the canvas (default: 32)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75, 0.9], help="default: 0.5 0.75 0.9")
    parser.add_argument("--groups", type=int, default=16, help="prefixes at each ratio (default: 16)")
    parser.add_argument("--questions", type=int, default=4, help="requests that share each of them (default: 4)")
    parser.add_argument("--steps", type=int, default=32, help="denoising steps (default: 32)")
    parser.add_argument("--refresh-interval", type=int, default=4, help="R (default: 4)")
    parser.add_argument("--block", type=int, default=8, help="block length of the Fast-dLLM cases (default: 8)")
    parser.add_argument("--threshold", type=float, default=0.9, help="their confidence threshold (default: 0.9)")
    parser.add_argument("--depths", type=int, nargs="*", default=[], help="also a sweep over these depths")
    parser.add_argument("--intervals", type=int, nargs="*", default=[], help="also a sweep over these R")
    parser.add_argument("--seed", type=int, default=1000, help="of the samples; training draws from others")


def run(arguments: argparse.Namespace) -> int:
    """Measure what is missing, print the tables, write them and the plots."""
    from runtime.engine import Engine

    arguments.out.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"model": arguments.model, "dtype": arguments.dtype, "page_size": 1}
    for name in ("threads", "depth_table"):
        if (value := getattr(arguments, name)) is not None:
            options[name] = value
    with Engine(**options) as engine:
        bench = _Bench(engine, arguments)
        bench.measure()
    sections = bench.sections()
    for title, rows in sections.items():
        wide_console().print(_table(title, rows))
    (arguments.out / "table.md").write_text("\n\n".join(_markdown(*item) for item in sections.items()) + "\n")
    _plot_sweeps(bench, arguments.out)
    return 0


Row = tuple[str, Outcome]


class _Bench:
    """Cells times cases."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace):
        a = self.arguments = arguments
        path = resolve_model(engine.config.model)
        vocabulary = Vocabulary(path)
        info = engine.info.diffusion
        if info is None:
            raise ModelError(f"{arguments.model} is no diffusion model")
        self.source = Source(vocabulary, ("bench", a.seed))
        self.runner = Runner(engine, vocabulary.end)
        self.records = Records(a.out / "records.jsonl")
        self.cells = [Cell(task, a.room, ratio) for task in a.tasks for ratio in sorted(a.ratios)]
        self.plan = Plan(a.room, a.steps, a.block, a.refresh_interval, a.threshold, a.depth, info.num_layers)
        self._of = {"model": path.name, "seed": a.seed, "dtype": a.dtype, "questions": a.questions}
        # What a depth of None means.
        self._table = info.depth_table

    def cases(self) -> dict[str, list[Case]]:
        """The table's and the sweeps' cases."""
        found = {"table": table_cases(self.plan)}
        if self.arguments.depths:
            found["depth"] = depth_cases(self.plan, self.arguments.depths)
        if self.arguments.intervals:
            found["R"] = interval_cases(self.plan, self.arguments.intervals)
        return found

    def measure(self) -> None:
        """Run what has no record yet; groups first, so that every case has some samples early."""
        work = [
            (number, cell, case)
            for number in range(self.arguments.groups)
            for cell in self.cells
            for cases in self.cases().values()
            for case in cases
            if self.records.get(self._key(number, cell, case)) is None
        ]
        for number, cell, case in track(work, description="measuring", console=Console(stderr=True)):
            key = self._key(number, cell, case)
            if self.records.get(key) is None:  # the table and the sweeps have cases in common
                examples = cell.group(self.source, number, self.arguments.questions)
                self.records.put(key, self.runner.run(case, examples))

    def sections(self) -> dict[str, list[Row]]:
        """The rows of every table by its title."""
        found = {}
        for cell in self.cells:
            for kind, cases in self.cases().items():
                rows = [(case.name, self._outcome(cell, case)) for case in cases]
                found[self._title(kind, cell, rows[0][1])] = rows
        return found

    def sweep(self, kind: str) -> Iterator[tuple[str, list[Row]]]:
        """The rows of a sweep by cell."""
        for cell in self.cells:
            rows = [(case.name, self._outcome(cell, case)) for case in self.cases()[kind]]
            yield f"{cell.task}, r = {rows[0][1].ratio:.2f}", rows

    def _outcome(self, cell: Cell, case: Case) -> Outcome:
        total = Outcome()
        for number in range(self.arguments.groups):
            outcome = self.records.get(self._key(number, cell, case))
            assert outcome is not None
            total.add(outcome)
        return total

    def _key(self, number: int, cell: Cell, case: Case) -> dict[str, Any]:
        table = {"table": self._table} if case.fields.get("depth", 0) is None else {}
        return {**self._of, **table, "group": number, **asdict(cell), "case": case.fields}

    def _title(self, kind: str, cell: Cell, first: Outcome) -> str:
        by = {"table": "", "depth": ", by depth", "R": ", by R"}[kind]
        plan = self.plan if kind != "R" else replace(self.plan, interval=0)
        interval = f", R = {plan.interval}" if plan.interval else ""
        return (
            f"{cell.task}{by}: r = {first.ratio:.2f}, {cell.room} tokens in {plan.steps} steps{interval}, "
            f"{first.answers} answers"
        )


_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "exact %": lambda o: f"{100 * o.exact / o.answers:.1f}",
    "tokens right %": lambda o: f"{100 * o.right / o.tokens:.1f}",
    "tokens/s": lambda o: f"{o.generated / o.seconds:.1f}",
    "rows/answer": lambda o: f"{o.rows / o.answers:.0f}",
    "depth": lambda o: str(o.depth),
}


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title)
    for column in ("", *_COLUMNS):
        table.add_column(column, justify="right" if column else "left")
    for name, outcome in rows:
        table.add_row(name, *(column(outcome) for column in _COLUMNS.values()))
    return table


def _markdown(title: str, rows: list[Row]) -> str:
    lines = [f"{title}\n", f"| | {' | '.join(_COLUMNS)} |", "| --- |" + " --- |" * len(_COLUMNS)]
    lines += [f"| {name} | {' | '.join(column(o) for column in _COLUMNS.values())} |" for name, o in rows]
    return "\n".join(lines)


def _plot_sweeps(bench: _Bench, out: Path) -> None:
    for kind in set(bench.cases()) - {"table"}:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.4, 3.4), layout="constrained")
        axes = figure.subplots()
        for label, rows in bench.sweep(kind):
            x = [int(name.split(" = ")[1]) for name, _ in rows]
            axes.plot(x, [100 * o.right / o.tokens for _, o in rows], marker="o", label=label)
        axes.set(xlabel=kind, ylabel="tokens right, %", ylim=(0, 102))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(out / f"{kind.lower()}.png", dpi=150)
