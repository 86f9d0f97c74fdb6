"""`ramet bench faults`: a server under clients that leave, stall or send rubbish, signals, and a long soak."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import ClientError
from rich.console import Console

from loadgen.faults.amplify import amplify
from loadgen.faults.clients import fuzz, large, slow, storm
from loadgen.faults.descriptors import MOST, descriptors
from loadgen.faults.endings import drain, kill
from loadgen.faults.frozen import frozen
from loadgen.faults.held import held
from loadgen.faults.pages import pages
from loadgen.faults.retraction import retraction
from loadgen.faults.server import Finding, running_server
from loadgen.faults.signals import signals
from loadgen.faults.soak import soak
from loadgen.faults.tiers import tiers
from loadgen.http import options
from loadgen.http.outputs import add_files, write_files
from loadgen.http.tables import make_table, wide_console


class Case(NamedTuple):
    """A case, and the options of its server; without them it starts servers itself, with the options it is given."""

    run: Callable[[Any, float, random.Random], Awaitable[Finding]]
    options: tuple[str, ...] | None = None


_POOL = ("--pool-tokens", "4096")
CASES = {
    "storm": Case(storm, _POOL),
    "slow": Case(slow, (*_POOL, "--client-timeout", "3")),
    "large": Case(large, _POOL),
    "fuzz": Case(fuzz, (*_POOL, "--max-output-tokens", "64")),
    "kill": Case(kill, (*_POOL, "--on-engine-death", "restart")),
    "drain": Case(drain, _POOL),
    "descriptors": Case(descriptors, (*_POOL, "--max-connections", str(MOST))),
    "held": Case(held, ("--pool-tokens", "16384")),
    "frozen": Case(frozen, (*_POOL, "--dtype", "float32", "--step-timeout", "2", "--on-engine-death", "restart")),
    "signals": Case(signals),
    "pages": Case(pages, _POOL),
    "amplify": Case(amplify, _POOL),
    "retraction": Case(retraction),
    "tiers": Case(tiers),
    # Equal answers are promised in float32. The pool is too small for the load, so that requests are retracted.
    "soak": Case(soak, ("--pool-tokens", "1024", "--max-running", "20", "--dtype", "float32", "--debug-invariants")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", nargs="+", choices=[*CASES, "all"], default=["all"], help="default: all of them")
    parser.add_argument(
        "--scale",
        type=options.positive,
        default=1.0,
        metavar="X",
        help="factor on all numbers and durations; default: 1",
    )
    parser.add_argument("--seed", type=options.whole, metavar="N", help="default: a new one, which is printed")
    add_files(parser, "json")
    parser.add_argument("server_options", nargs="*", help="after --: options for the servers that are started")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases, each on a server of its own; 0 if none found a problem, else 1."""
    console = wide_console()
    if arguments.seed is None:
        arguments.seed = random.randrange(1 << 16)
    console.print(f"--seed {arguments.seed}")
    findings = {}
    for name in CASES if "all" in arguments.case else arguments.case:
        console.print(f"{name} ...")
        try:
            findings[name] = asyncio.run(_run(CASES[name], arguments))
        except (OSError, RuntimeError, ClientError) as error:
            findings[name] = Finding("given up", problems=[repr(error)])
        for problem in findings[name].problems:
            console.print(f"  {problem}", style="red", markup=False)
    _report(console, findings)
    write_files(arguments, {"format": "ramet-faults-1"} | {name: vars(found) for name, found in findings.items()})
    return int(any(found.problems for found in findings.values()))


async def _run(case: Case, arguments: argparse.Namespace) -> Finding:
    if case.options is None:
        return await case.run(arguments.server_options, arguments.scale, random.Random(arguments.seed))
    async with running_server([*case.options, *arguments.server_options]) as server:
        return await case.run(server, arguments.scale, random.Random(arguments.seed))


def _report(console: Console, findings: dict[str, Finding]) -> None:
    for name, found in findings.items():
        if found.rows:
            columns, *parts = found.rows
            console.print(make_table(name, columns, parts, left=len(columns)))
    rows = [[name, found.done, found.seen, "no" if found.problems else "yes"] for name, found in findings.items()]
    console.print(make_table("faults", ("case", "done", "seen", "stood"), rows, left=4))
