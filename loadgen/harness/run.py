"""The run of a bench: alternation, warm-up, repeats, and the files at the end."""

import argparse
import math
import random
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic.fields import FieldInfo
from tqdm import tqdm

from loadgen.harness.bench import COMMON, Bench
from loadgen.harness.machine import machine
from loadgen.harness.options import add_options, make
from loadgen.harness.plots import default_plot
from loadgen.harness.report import page, terminal_tables, wide_console
from loadgen.harness.results import BenchError, Cell, Results, read_facts

# Options that do not change what is measured.
_FREE = {"repeats", "seed", "json_", "resume", "guard", "limit", "markdown", "plot"}


def add_bench_options(parser: argparse.ArgumentParser, bench: type[Bench]) -> None:
    """Add a bench's own options, in the groups that its fields name, and the options of all benches."""
    groups: dict[str, dict[str, FieldInfo]] = {"options": {}}
    for name, field in bench.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        group = "measurement" if name in COMMON else str(extra.get("group", "options"))
        groups.setdefault(group, {})[name] = field
    add_options(parser, groups.pop("options"))
    for title, fields in groups.items():
        add_options(parser.add_argument_group(title), fields)


def run_bench(name: str, kind: type[Bench], arguments: argparse.Namespace) -> int:
    """Run a bench from parsed options; returns the exit code.

    It is 1 if cells failed, 2 if the bench cannot run, 3 if `--limit` ended it early, and 130 after Ctrl-C.
    """
    try:
        bench = make(kind, arguments)
    except ValueError as error:
        return _refused(name, error)
    try:
        return execute(name, bench)
    except BenchError as error:
        return _refused(name, error)


def _refused(name: str, error: Exception) -> int:
    print(f"ramet bench {name}: {error}", file=sys.stderr)
    return 2


def execute(name: str, bench: Bench) -> int:
    """Measure, print the tables, write the files. Ctrl-C ends the measurements, not the report; nor does an error."""
    seed = secrets.randbits(32) if bench.seed is None else bench.seed
    facts = {"bench": name, "options": bench.model_dump(mode="json", exclude=_FREE), "seed": seed}
    facts |= {"machine": machine(), "started": datetime.now(UTC).isoformat(timespec="seconds")}
    results = Results(facts, bench.figures, bench.sections, bench.baseline(), bench.json_)
    results.begin_file(bench.resume)
    code = None
    try:
        with bench.session():
            cells = [cell for cell in bench.cells() if _is_wanted(cell, bench.only)]
            if not _measure_all(bench, cells, results):
                code = 3
            results.in_order(cells)
    except KeyboardInterrupt:
        code = 130
    if results.cells or results.failed:
        _write(bench, results)
    if code is None:
        code = 1 if results.failed or not results.cells else bench.exit_code(results)
    return code


def _write(bench: Bench, results: Results) -> None:
    wide_console().print(*bench.details(results), *terminal_tables(results))
    if bench.plot is not None and results.cells and not bench.draw_plot(results, bench.plot):
        default_plot(results, bench.plot)
    if bench.markdown is not None:
        bench.markdown.write_text(page(bench, results), encoding="utf-8")


def _measure_all(bench: Bench, cells: list[Cell], results: Results) -> bool:
    """Measure what `results` lacks; False if the time limit was reached before the end."""
    plan = [
        (cell, repeat) for cell, repeat in _order(bench, cells)
        if not results.has(cell, repeat) and not (bench.guard and results.has_failed(cell))
    ]  # fmt: skip
    missing = {id(cell) for cell, repeat in plan if repeat >= 0}
    plan = [(cell, repeat) for cell, repeat in plan if id(cell) in missing]
    seed, deadline = results.facts["seed"], time.monotonic() + (math.inf if bench.limit is None else bench.limit)
    for cell, repeat in tqdm(plan, desc=results.facts["bench"], unit="cell", disable=None):
        if time.monotonic() >= deadline:
            done = sum(map(len, results.measured.values()))
            print(f"--limit {bench.limit:g} ended this after {done} of {bench.repeats * len(cells)} measurements",
                  file=sys.stderr, flush=True)  # fmt: skip
            return False
        if bench.guard:
            results.fail(cell, repeat, "did not end")
        try:
            figures = dict(bench.measure(cell, random.Random(f"{seed} {repeat}")))
        except Exception as error:  # of any library: the other cells are still measured
            if isinstance(error, BenchError) and not bench.guard:
                raise
            traceback.print_exc()
            results.fail(cell, repeat, _said(error))
            if bench.lost():
                raise BenchError(f"no more here after {cell}; --resume --guard measures the others") from error
            continue
        if repeat >= 0:
            results.add(cell, repeat, figures)
            if not sys.stderr.isatty():  # tqdm is silent there
                print("measured:", *(f"{name} {value}" for name, value in cell.items()), file=sys.stderr, flush=True)
    return True


def _is_wanted(cell: Cell, only: Sequence[str]) -> bool:
    """Whether a cell has one of the values that `only` gives for each of its names."""
    given: dict[str, set[str]] = {}
    for name, _, value in (one.partition("=") for one in only):
        given.setdefault(name, set()).add(value)
    return all(str(cell[name]) in values for name, values in given.items() if name in cell)


def _said(error: Exception) -> str:
    """An error in a line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]} ({Path(place.filename).name}:{place.lineno})"


def _order(bench: Bench, cells: list[Cell]) -> Iterator[tuple[Cell, int]]:
    """The cells of every round with its number; every other round is backwards. Negative rounds are the warm-up."""
    for repeat in range(-bench.warmup, bench.repeats):
        for cell in cells if repeat % 2 == 0 else reversed(cells):
            yield cell, repeat


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ramet bench report`."""
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="written by --json, all by the same bench")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a result page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot (PNG or SVG)")


def run_report(find_bench: Callable[[str], type[Bench]], arguments: argparse.Namespace) -> int:
    """Show the results of earlier runs; several of them side by side, compared with the first one."""
    try:
        return _report(find_bench, arguments)
    except BenchError as error:
        return _refused("report", error)


def _report(find_bench: Callable[[str], type[Bench]], arguments: argparse.Namespace) -> int:
    paths = arguments.files
    facts = [read_facts(path) for path in paths]
    if len({one["bench"] for one in facts}) > 1:
        raise BenchError("the files must be results of one bench")
    kind = find_bench(facts[0]["bench"])
    bench = kind(**facts[0]["options"], markdown=arguments.markdown, plot=arguments.plot)
    results = Results(facts[0], bench.figures, bench.sections, bench.baseline())
    if len(paths) > 1:
        results.base = ("run", paths[0].stem)
    for path in paths:
        named = {"run": path.stem} if len(paths) > 1 else {}
        results.read(path, **named)
    _write(bench, results)
    return 0
