"""`ramet bench sweep`: rising load until a service level breaks; the last level that holds is the knee."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from loadgen.http import options
from loadgen.http.arrivals import Arrivals, Closed, Gamma
from loadgen.http.outputs import add_files, write_files
from loadgen.http.plots import sweep_figure
from loadgen.http.progress import live
from loadgen.http.run import execute
from loadgen.http.summary import Level
from loadgen.http.tables import make_table, wide_console
from loadgen.http.target import TargetError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="default: http://127.0.0.1:30000")
    parser.add_argument("--over", choices=["concurrency", "rate"], default="concurrency", help="default: concurrency")
    parser.add_argument("--start", type=options.positive, default=1.0, metavar="X", help="the first load; default: 1")
    parser.add_argument("--factor", type=options.positive, default=2.0, metavar="X", help="to the next; default: 2")
    parser.add_argument("--stop", type=options.positive, default=64.0, metavar="X", help="the last load; default: 64")
    parser.add_argument(
        "--refine", type=options.whole, default=2, metavar="N", help="runs between the last load that held and the "
        "first that broke; default: 2"
    )  # fmt: skip
    parser.add_argument(
        "--share", type=options.positive, default=0.95, help="of requests that must keep --goodput; default: 0.95"
    )
    options.add_target(parser)
    options.add_workload(parser)
    options.add_bounds(parser)
    add_files(parser, json="the summary of every level", plot="throughput and latency over load, as PNG or SVG")


def run(arguments: argparse.Namespace) -> int:
    """Run the sweep; 0, or 130 if the user ended it."""
    console = wide_console()
    try:
        _check(arguments)
        levels, interrupted = _sweep(arguments, console)
    except (TargetError, ValueError, OSError) as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    levels.sort(key=lambda level: level.load)
    held = knee(levels)
    console.print(_table(levels, arguments, held))
    data = {"over": arguments.over, "goodput": arguments.goodput, "share": arguments.share, "knee": held}
    levels_data = [{"load": level.load, "held": level.held, "summary": level.summary} for level in levels]
    draw = (lambda path: sweep_figure(levels, arguments.over, held).savefig(path, dpi=130)) if levels else None
    write_files(arguments, {"format": "ramet-sweep-1", **data, "levels": levels_data}, plot=draw)
    return 130 if interrupted else 0


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.goodput or arguments.factor <= 1 or arguments.share > 1:
        raise ValueError("a sweep needs --goodput, the service level, a --factor above 1 and a --share of at most 1")
    if arguments.over == "concurrency" and (arguments.start < 1 or arguments.start % 1):
        raise ValueError("a sweep over concurrency needs a whole number of at least 1 as --start")
    if arguments.plot:
        options.need_matplotlib()


def knee(levels: list[Level]) -> float | None:
    """The last load before the first that broke the service level; None if the first one broke it."""
    held = None
    for level in sorted(levels, key=lambda level: level.load):
        if not level.held:
            break
        held = level.load
    return held


def _sweep(arguments: argparse.Namespace, console: Console) -> tuple[list[Level], bool]:
    """All levels, and whether the user ended it: rising loads until one breaks, then halves of the gap below it."""
    target = options.target(arguments, arguments.url, arguments.url)
    prepared = options.prepared(arguments, target)
    work, base = options.workload(arguments), options.seed(arguments)
    levels: list[Level] = []

    def hold(load: float) -> bool | None:
        """Whether a load holds; None if the user ended it."""
        arrivals: Arrivals = Closed(int(load)) if arguments.over == "concurrency" else Gamma(load)
        # A seed for each level, so that none hits what the one before left in the cache.
        plan = options.plan(arguments, work, arrivals, base + len(levels))
        result = execute(prepared, plan, lambda running: live(running, console, f"sweep: {arrivals}"))
        share = result.summary["goodput"]["share"]
        if result.interrupted:
            return None
        levels.append(Level(load, result.summary, share >= arguments.share))
        console.print(f"{arrivals}: {share:.1%} of requests keep the service level")
        return levels[-1].held

    load, good = arguments.start, 0.0
    while load <= arguments.stop:
        held = hold(load)
        if held is None:
            return levels, True
        if not held:
            break
        good, load = load, _next(load, arguments)
    else:
        return levels, False
    bad = load
    for _ in range(arguments.refine):
        middle = (good + bad) / 2
        if arguments.over == "concurrency" and (middle := int(middle)) in (int(good), int(bad)):
            break
        held = hold(middle)
        if held is None:
            return levels, True
        good, bad = (middle, bad) if held else (good, middle)
    return levels, False


def _next(load: float, arguments: argparse.Namespace) -> float:
    grown = load * arguments.factor
    return max(int(grown), load + 1) if arguments.over == "concurrency" else grown


def _table(levels: list[Level], arguments: argparse.Namespace, held: float | None) -> Table:
    found = "none" if held is None else f"{held:g}"
    columns = ("req/s", "output tok/s", "TTFT p50 ms", "TTFT p95", "TPOT p50 ms", "TPOT p95", "kept", "failed")
    title = f"{arguments.over} up to which {' '.join(arguments.goodput)} holds: {found}"
    table = make_table(title, (arguments.over, *columns), left=0)
    for level in levels:
        summary, latency = level.summary, level.summary["latency"]
        times = [
            f"{1000 * latency[kind][point]:.0f}" if kind in latency else "-"
            for kind in ("ttft", "tpot")
            for point in ("p50", "p95")
        ]
        throughput = [f"{summary['request_throughput']:.2f}", f"{summary['output_throughput']:.1f}"]
        kept = f"{summary['goodput']['share']:.1%}"
        failed = f"{summary['requests'] - summary['completed']}"
        table.add_row(f"{level.load:g}", *throughput, *times, kept, failed, style=None if level.held else "dim")
    return table
