"""`ramet bench serve`: load on a running server: latency, throughput, cache hits, errors."""

from __future__ import annotations

import argparse
import sys

from loadgen.http import options
from loadgen.http.files import write_csv, write_json
from loadgen.http.outputs import new_file
from loadgen.http.progress import live
from loadgen.http.report import write_report
from loadgen.http.run import Result, execute
from loadgen.http.run_tables import run_tables
from loadgen.http.tables import wide_console
from loadgen.http.target import TargetError
from loadgen.http.verdict import of_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="default: http://127.0.0.1:30000")
    options.add_target(parser)
    options.add_workload(parser)
    options.add_arrivals(parser)
    options.add_bounds(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=new_file, metavar="FILE", help="all results, with a record of each request")
    group.add_argument("--csv", type=new_file, metavar="FILE", help="a line for each request")
    group.add_argument("--html", type=new_file, metavar="FILE", help="a report with plots, as one file")
    group.add_argument("--name", help="the run's name in reports and comparisons; default: the URL")


def run(arguments: argparse.Namespace) -> int:
    """Run; 0 if a request succeeded, 1 if none did, 130 if the user ended it."""
    console = wide_console()
    target = options.target(arguments, arguments.name or arguments.url, arguments.url)
    try:
        if arguments.html:
            options.need_matplotlib()
        work = options.workload(arguments)
        plan = options.plan(arguments, work, options.arrivals(arguments, work), options.seed(arguments))
        prepared = options.prepared(arguments, target)
        title = f"{arguments.workload} on {target.name}, {plan.arrivals}, seed {plan.seed}"
        console.print(title)
        result = execute(prepared, plan, lambda load: live(load, console, title))
    except (ValueError, OSError, TargetError) as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    console.print(run_tables(result), of_run(result.records))
    try:
        _write(arguments, title, result)
    except OSError as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    return 130 if result.interrupted else int(result.summary["completed"] == 0)


def _write(arguments: argparse.Namespace, title: str, result: Result) -> None:
    if arguments.json:
        write_json(arguments.json, result.as_dict())
    if arguments.csv:
        write_csv(arguments.csv, result.records)
    if arguments.html:
        write_report(arguments.html, title, result)
