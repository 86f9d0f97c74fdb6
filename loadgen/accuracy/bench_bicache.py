"""`ramet bench bicache`: accuracy and cost of reusing a shared prefix in a diffusion model (BiCache, Table 1).

All outcomes are recorded in a file, so that an interrupted run goes on, and a run with more samples, ratios or sweeps
measures only the new ones.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import track

from loadgen.accuracy.cases import (
    Case,
    Plan,
    depth_cases,
    interval_cases,
    measured_cases,
    rule_cases,
    table_cases,
    threshold_cases,
)
from loadgen.accuracy.measure import Cell, Outcome, Runner
from loadgen.accuracy.rules import Rules, TaskSamples, profile_tasks
from loadgen.accuracy.sections import (
    Cluster,
    Row,
    Section,
    account_section,
    case_section,
    gain_section,
    measured_section,
    pooled_section,
)
from loadgen.accuracy.tasks import TASKS, Source
from loadgen.accuracy.vocabulary import Vocabulary
from loadgen.http.outputs import drawing
from loadgen.http.tables import wide_console
from runtime.config import default_cache_dir
from runtime.engine.offline import Engine
from runtime.errors import ModelError
from runtime.models.adapters.merge import merge_adapter
from runtime.models.default_model import fetch_default
from runtime.models.resolve import resolve_model
from runtime.reuse.bicache.profile.records import Records
from runtime.reuse.bicache.profile.settings import ProfileSettings

_MODEL = "smollm2-135m-diffusion"
# Block length and confidence threshold of the Fast-dLLM cases.
_BLOCK, _THRESHOLD = 8, 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("bicache"), help="directory of records, table and plots")
    parser.add_argument("--model", default=_MODEL, help=f"a diffusion model adapted to the tasks (default: {_MODEL})")
    parser.add_argument("--adapter", type=Path, help="instead, one of the default model, as `train_adapter` writes it")
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
    parser.add_argument("--depths", type=int, nargs="*", default=[], help="also a sweep over these depths")
    parser.add_argument("--intervals", type=int, nargs="*", default=[], help="also a sweep over these R")
    parser.add_argument(
        "--taus", type=float, nargs="*", default=[], help="also a sweep over these thresholds of the paper's rule"
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="instead of the table: the paper's rule at 0.97, calibrated and measured depths",
    )
    parser.add_argument("--profile-samples", type=int, default=8, help="requests a ratio for both (default: 8)")
    parser.add_argument("--kl-bound", type=float, default=0.05, help="nats, of the calibration (default: 0.05)")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="instead of the table: depths and intervals that are measured in serving",
    )
    parser.add_argument(
        "--alone", action="store_true", help="of these the cases that reuse, without Fast-dLLM's caches"
    )
    parser.add_argument("--bound", type=float, default=0.05, help="nats, of these (default: 0.05)")
    parser.add_argument("--drift", type=float, default=0.1, help="threshold of refreshes on drift (default: 0.1)")
    parser.add_argument("--minutes", type=float, help="end after that time; the same command goes on from there")
    parser.add_argument("--seed", type=int, default=1000, help="of the samples; training draws from others")


def run(arguments: argparse.Namespace) -> int:
    """Measure the missing outcomes, print the tables, write them and the plots."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = arguments.model
    if (adapter := arguments.adapter) is not None:
        model = str(merge_adapter(fetch_default(default_cache_dir()), adapter, arguments.out, adapter.stem))
    options: dict[str, Any] = {"model": model, "dtype": arguments.dtype, "page_size": 1}
    for name in ("threads", "depth_table"):
        if (value := getattr(arguments, name)) is not None:
            options[name] = value
    with Engine(**options) as engine:
        bench = _Bench(engine, arguments)
        try:
            bench.profile()
            bench.measure()
        except _TimeIsUp:
            print("the time is up; the same command goes on from here", file=sys.stderr)
    sections = bench.sections()
    for section in sections:
        wide_console().print(section.table())
    (arguments.out / "table.md").write_text("\n".join(section.markdown() for section in sections))
    _plot_sweeps(bench, arguments.out)
    if rows := list(bench.rows("rule")):
        _plot_rules(rows, arguments.out / "rules.png")
    return 0


class _TimeIsUp(Exception):
    """The time of `--minutes` is up."""


class _Bench:
    """Cells x cases. `_rules` is None until the tasks are profiled, and where no option needs that."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace):
        a = self.arguments = arguments
        path = resolve_model(engine.config.model)
        vocabulary = self._vocabulary = Vocabulary(path)
        info = engine.info.diffusion
        if info is None:
            raise ModelError(f"{arguments.model} is no diffusion model")
        self.source = Source(vocabulary, ("bench", a.seed))
        self.runner = Runner(engine, vocabulary.end)
        self.records = Records(a.out / "records.jsonl")
        self.cells = [Cell(task, a.room, ratio) for task in a.tasks for ratio in sorted(a.ratios)]
        self.plan = Plan(a.room, a.steps, _BLOCK, a.refresh_interval, _THRESHOLD, a.depth, info.num_layers)
        self._of = {"model": path.name, "seed": a.seed, "dtype": a.dtype, "questions": a.questions}
        # The depth table: the meaning of a depth of None.
        self._table = info.depth_table
        self._executor = engine.core.executor
        self._rules: Rules | None = None
        self._end_s = monotonic() + 60 * a.minutes if a.minutes is not None else math.inf

    def _check_time(self) -> None:
        if monotonic() > self._end_s:
            raise _TimeIsUp

    def profile(self) -> None:
        """Profile the tasks where an option needs it; first of all, while the engine's pool is empty."""
        a = self.arguments
        if not (a.taus or a.rules):
            return
        source = Source(self._vocabulary, ("profile", a.seed))
        ratios = [round(100 * ratio) for ratio in a.ratios]
        samples = TaskSamples(a.tasks, a.room, source)
        settings = ProfileSettings(ratios=ratios, samples=a.profile_samples, gen_length=a.room, kl_bound=a.kl_bound)
        settings = settings.model_copy(update={"length": samples.longest(settings)})
        of = {**self._of, "tasks": a.tasks, "room": a.room}
        path = a.out / "profile.json"
        self._rules = profile_tasks(self._executor, samples, settings, of, path, self._check_time)

    def cases(self, cell: Cell) -> dict[str, list[Case]]:
        """The table's and the sweeps' cases."""
        a, rules, ratio = self.arguments, self._rules, round(100 * cell.ratio)
        if a.measured:
            found = {"measured": measured_cases(self.plan, a.bound, a.drift, a.alone)}
        else:
            found = {} if a.rules else {"table": table_cases(self.plan)}
        if a.depths:
            found["depth"] = depth_cases(self.plan, a.depths)
        if a.intervals:
            found["R"] = interval_cases(self.plan, a.intervals)
        if a.taus and rules:
            found["tau"] = threshold_cases(self.plan, {tau: rules.by_threshold(ratio, tau) for tau in a.taus})
        if a.rules and rules:
            depths = {
                f"the paper's rule, tau = {_TAU}": rules.by_threshold(ratio, _TAU),
                f"calibrated, at most {a.kl_bound:g} nats": rules.calibrated(ratio),
            }
            known = {rule: (depth, rules.divergence(ratio, depth)) for rule, depth in depths.items()}
            found["rule"] = rule_cases(self.plan, known, a.bound)
        return found

    def measure(self) -> None:
        """Run the cases without an outcome, group by group, so that every case has some samples early."""
        work = [
            (number, cell, case)
            for number in range(self.arguments.groups)
            for cell in self.cells
            for cases in self.cases(cell).values()
            for case in cases
            if self.records.get(self._key(number, cell, case)) is None
        ]
        for number, cell, case in track(work, description="measuring", console=Console(stderr=True)):
            key = self._key(number, cell, case)
            if self.records.get(key) is None:  # the table and the sweeps have cases in common
                self._check_time()
                examples = cell.group(self.source, number, self.arguments.questions)
                self.records.put(key, asdict(self.runner.run(case, examples)))

    def sections(self) -> list[Section]:
        """All tables with at least one whole group."""
        whole = list(self.rows("table"))
        found = [case_section(self._title("table", cell, rows[0][1]), rows) for cell, rows in whole]
        if whole:
            named = [(f"{cell.task}, r = {rows[0][1].ratio:.2f}", rows) for cell, rows in whole]
            found.append(gain_section(named, self.plan))
        if self.arguments.measured:
            found = self._measured_sections()
        elif not self.arguments.rules and (clusters := self._clusters()):
            found.append(pooled_section(clusters))
        for kind in _KINDS:
            found += [case_section(self._title(kind, cell, rows[0][1]), rows) for cell, rows in self.rows(kind)]
        return found

    def _measured_sections(self) -> list[Section]:
        clusters = self._clusters("measured")
        each = len(clusters) // len(self.arguments.tasks)
        named = {task: clusters[i * each :][:each] for i, task in enumerate(self.arguments.tasks)}
        named["all tasks"] = clusters
        return [
            make(f"{name}, {what}{self._about()}", found)
            for name, found in named.items()
            if found
            for make, what in ((measured_section, ""), (account_section, "rows of a list's requests, "))
        ]

    def _about(self) -> str:
        a = self.arguments
        return f"r = {', '.join(f'{ratio:.2f}' for ratio in a.ratios)}, bound {a.bound:g} nats, drift {a.drift:g}"

    def _clusters(self, kind: str = "table") -> list[Cluster]:
        """The outcomes of a kind of case by list, over the groups that all cells have finished."""
        groups = min(self._whole_groups(cell) for cell in self.cells)
        return [self._cluster(kind, task, number) for task in self.arguments.tasks for number in range(groups)]

    def _cluster(self, kind: str, task: str, number: int) -> Cluster:
        cells = [cell for cell in self.cells if cell.task == task]
        return {
            case.name: Outcome.total(self._measured(number, cell, case) for cell in cells)
            for case in self.cases(cells[0])[kind]
        }

    def rows(self, kind: str) -> Iterator[tuple[Cell, list[Row]]]:
        """The rows of a kind of case for each cell, over the groups that all its cases have finished."""
        for cell in self.cells:
            groups, cases = self._whole_groups(cell), self.cases(cell).get(kind, [])
            if groups and cases:
                yield cell, [(case, self._outcome(cell, case, groups)) for case in cases]

    def _whole_groups(self, cell: Cell) -> int:
        every = [case for cases in self.cases(cell).values() for case in cases]
        for number in range(self.arguments.groups):
            if any(self.records.get(self._key(number, cell, case)) is None for case in every):
                return number
        return self.arguments.groups

    def _outcome(self, cell: Cell, case: Case, groups: int) -> Outcome:
        return Outcome.total(self._measured(number, cell, case) for number in range(groups))

    def _measured(self, number: int, cell: Cell, case: Case) -> Outcome:
        return Outcome(**self.records.get(self._key(number, cell, case)))

    def _key(self, number: int, cell: Cell, case: Case) -> dict[str, Any]:
        by_table = case.fields.get("reuse") is not False and case.fields.get("depth") is None
        table = {"table": self._table} if by_table else {}
        cold = {"cold": True} if case.cold else {}
        return {**self._of, **table, **cold, "group": number, **asdict(cell), "case": case.fields}

    def _title(self, kind: str, cell: Cell, first: Outcome) -> str:
        by = f", by {kind}" if kind in _KINDS else ""
        plan = self.plan if kind != "R" else replace(self.plan, interval=0)
        interval = f", R = {plan.interval}" if plan.interval else ""
        return (
            f"{cell.task}{by}: r = {first.ratio:.2f}, {cell.room} tokens in {plan.steps} steps{interval}, "
            f"{first.answers} answers"
        )


# Kinds of cases besides the table.
_KINDS = ("depth", "R", "tau", "rule")
# The paper's threshold.
_TAU = 0.97


def _plot_sweeps(bench: _Bench, out: Path) -> None:
    for kind in ("depth", "R", "tau"):
        if lines := list(bench.rows(kind)):
            _plot(kind, lines, out / f"{kind.lower()}.png")


def _plot_rules(cells: list[tuple[Cell, list[Row]]], path: Path) -> None:
    """Speed by divergence of each rule: a large mark for each ratio, joined, and a small one for each cell."""
    ratios = sorted({cell.ratio for cell, _ in cells})
    with drawing(path, (7.2, 3.6)) as axes:
        for number, rule in enumerate(zip(*(rows for _, rows in cells), strict=True)):
            outcomes = [outcome for _, outcome in rule]
            nats = [case.value if outcome.divergence is None else outcome.divergence for case, outcome in rule]
            speeds = [outcome.generated / outcome.cpu_s for outcome in outcomes]
            whole, depths = Outcome.total(outcomes), sorted({outcome.depth for outcome in outcomes})
            name = f"{rule[0][0].name}: {' to '.join(map(str, depths[:: max(len(depths) - 1, 1)]))} layers, "
            name += f"{whole.exact} of {whole.answers} right"
            axes.plot(nats, speeds, ".", color=f"C{number}")
            found = [[i for i, (cell, _) in enumerate(cells) if cell.ratio == ratio] for ratio in ratios]
            x = [sum(nats[i] for i in here) / len(here) for here in found]
            totals = [Outcome.total(outcomes[i] for i in here) for here in found]
            y = [total.generated / total.cpu_s for total in totals]
            axes.plot(x, y, "o-", markersize=9, label=name, color=f"C{number}")
            for place, ratio in zip(zip(x, y, strict=True), ratios, strict=True):
                axes.annotate(f"r = {ratio:g}", place, (6, 6), textcoords="offset points", fontsize=7)
        axes.set_xscale("symlog", linthresh=0.01)
        axes.set(xlabel="divergence of the outputs from those without reuse, nats", ylabel="tokens for each CPU second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _plot(kind: str, lines: list[tuple[Cell, list[Row]]], path: Path) -> None:
    """Accuracy and throughput over a sweep, a line for each cell."""
    with drawing(path, (9.6, 3.4), 1, 2) as (right, speed):
        for cell, rows in lines:
            x, label = [case.value for case, _ in rows], f"{cell.task}, r = {rows[0][1].ratio:.2f}"
            right.plot(x, [100 * o.right / o.tokens for _, o in rows], marker="o", label=label)
            speed.plot(x, [o.generated / o.seconds for _, o in rows], marker="o", label=label)
        right.set(xlabel=kind, ylabel="tokens right, %", ylim=(0, 102))
        speed.set(xlabel=kind, ylabel="tokens/s", ylim=(0, None))
        for axes in (right, speed):
            axes.grid(alpha=0.3)
        right.legend()
