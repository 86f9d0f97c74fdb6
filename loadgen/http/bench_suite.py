"""`ramet bench suite`: six workloads on one or several servers, the same requests for each, in alternation."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from rich.console import Console

from loadgen.http import options
from loadgen.http.arrivals import Closed
from loadgen.http.files import write_json
from loadgen.http.lengths import Distribution
from loadgen.http.load import Bounds
from loadgen.http.outputs import add_files
from loadgen.http.run import Plan, Prepared, execute
from loadgen.http.suite_table import markdown, run_line, suite_table
from loadgen.http.tables import wide_console
from loadgen.http.target import TargetError
from loadgen.http.workloads import Workload
from loadgen.http.workloads.base import length
from loadgen.http.workloads.dialogues import Chat
from loadgen.http.workloads.prompts import FewShot, LongDecode, Rag, SharedPrefix, Unique


@dataclass(frozen=True)
class Case:
    """One workload of the suite.

    Attributes:
        levels: concurrencies at which it runs.
        rounds: requests of each user.
        least: minimum of requests.
    """

    title: str
    workload: Workload
    levels: tuple[int, ...]
    rounds: int
    least: int

    def requests(self, concurrency: int, scale: float) -> int:
        """Requests of one run; with several turns, those of whole conversations."""
        wanted = max(self.least, self.rounds * concurrency) * scale
        step = self.rounds if isinstance(self.workload, Chat) else 1
        return max(math.ceil(wanted / step), 1) * step


_TURNS = 6
CASES = {
    "a": Case("shared system prompt", SharedPrefix(groups=1), (1, 8, 32), rounds=3, least=8),
    "b": Case("documents (RAG)", Rag(), (8,), rounds=6, least=16),
    "c": Case("chat of 6 turns", Chat(turns=length(f"{_TURNS}")), (8,), rounds=_TURNS, least=2 * _TURNS),
    "d": Case("few-shot batch", FewShot(), (8,), rounds=6, least=16),
    "e": Case("unique prompts", Unique(), (8,), rounds=2, least=8),
    "f": Case("long decode", LongDecode(), (1, 8), rounds=1, least=2),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", nargs="+", required=True, metavar="[NAME=]URL", help="servers; the first is compared with the others"
    )
    parser.add_argument("--cases", default="".join(CASES), metavar="LETTERS", help=f"default: {''.join(CASES)}")
    parser.add_argument("--concurrency", type=options.count, nargs="+", metavar="N", help="instead of each case's own")
    parser.add_argument("--repeats", type=options.count, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--scale", type=options.positive, default=1.0, metavar="X", help="factor on the number of requests; default: 1"
    )
    parser.add_argument(
        "--length-scale",
        type=options.positive,
        default=1.0,
        metavar="X",
        help="factor on the length of prompts; default: 1",
    )
    parser.add_argument(
        "--warmup", type=options.whole, default=2, metavar="N", help="unique requests before every run; default: 2"
    )
    parser.add_argument("--seed", type=options.whole, help="default: another one every time")
    parser.add_argument("--answers", choices=["server", "scripted"], default="server", help="default: server")
    options.add_target(parser)
    parser.add_argument(
        "--server-body",
        type=options.reading(_named_body),
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="further fields of the requests to one of the servers",
    )
    add_files(parser, "markdown", json="the summary of every run; written after each run")


def _named_body(text: str) -> tuple[str, dict[str, Any]]:
    name, equals, body = text.partition("=")
    if not equals:
        raise ValueError("must be NAME=JSON")
    return name, options.json_object(body)


@dataclass(frozen=True)
class _Run:
    """One run of the suite. Equal runs have equal prompts, on every server."""

    case: str
    concurrency: int
    repeat: int

    def seed(self, base: int) -> int:
        return hash((base, ord(self.case), self.concurrency, self.repeat)) & 0xFFFFFFFF


def run(arguments: argparse.Namespace) -> int:
    """Run the suite; 0 if every run has a complete answer, 1 if one has none, 2 on an error, 130 after Ctrl-C."""
    if unknown := set(arguments.cases) - CASES.keys():
        print(f"ramet bench: --cases: no case {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    console = wide_console()
    rows: list[dict[str, Any]] = []
    try:
        servers = _servers(arguments)
        names = [server.target.name for server in servers]
        interrupted = _measure_all(arguments, servers, rows, console)
        console.print(suite_table(rows, names))
        if arguments.markdown:
            arguments.markdown.write_text(markdown(rows, names), encoding="utf-8")
    except (TargetError, ValueError, OSError) as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    return 130 if interrupted else int(any(not row["result"]["summary"]["completed"] for row in rows))


def _measure_all(
    arguments: argparse.Namespace, servers: list[Prepared], rows: list[dict[str, Any]], console: Console
) -> bool:
    """Append every run to `rows`; whether the user ended it."""
    seed = options.seed(arguments)
    head = {"format": "ramet-suite-1", "seed": seed, "servers": [server.target.name for server in servers]}
    for one in _runs(arguments):
        # Each repeat begins with another server, so that no server always follows the same one.
        for server in servers[one.repeat % len(servers) :] + servers[: one.repeat % len(servers)]:
            name = server.target.name
            result = execute(server, _plan(arguments, one, seed))
            data = result.as_dict()
            del data["requests"]
            label = {"case": CASES[one.case].title, "letter": one.case}
            rows.append(label | {"concurrency": one.concurrency, "repeat": one.repeat, "server": name, "result": data})
            console.print(f"{one.case} x{one.concurrency} #{one.repeat + 1} {name}: {run_line(data)}", highlight=False)
            if arguments.json:
                write_json(arguments.json, head | {"runs": rows})
            if result.interrupted:
                return True
    return False


def _plan(arguments: argparse.Namespace, one: _Run, seed: int) -> Plan:
    case = CASES[one.case]
    return Plan(
        workload=_scaled(case.workload, arguments.length_scale),
        arrivals=Closed(one.concurrency),
        bounds=Bounds(requests=case.requests(one.concurrency, arguments.scale)),
        seed=one.seed(seed),
        warmup=arguments.warmup,
        scripted=arguments.answers == "scripted",
        timeouts=options.timeouts(arguments),
    )


def _servers(arguments: argparse.Namespace) -> list[Prepared]:
    """The servers, with one cost of words for all, so that all get the same prompts."""
    bodies = dict(arguments.server_body)
    found = []
    for text in arguments.url:
        name, url = text.split("=", 1) if "=" in text.split("://")[0] else (text, text)
        target = options.target(arguments, name, url)
        found.append(options.prepared(arguments, target, bodies.pop(name, None)))
    if len({server.target.name for server in found}) < len(found):
        raise ValueError("--url: two servers have the same name")
    if bodies:
        raise ValueError(f"--server-body: no server is called {', '.join(bodies)}")
    best = min(found, key=lambda server: server.exactness)
    return [replace(server, cost=best.cost, counted=best.counted) for server in found]


def _runs(arguments: argparse.Namespace) -> Iterator[_Run]:
    for repeat in range(arguments.repeats):
        for letter, case in CASES.items():
            if letter in arguments.cases:
                for concurrency in arguments.concurrency or case.levels:
                    yield _Run(letter, concurrency, repeat)


def _scaled(workload: Workload, scale: float) -> Workload:
    """The workload with prompts and prefixes of another length, and the same answers."""
    lengths = {
        field.name: Distribution(value.kind, tuple(scale * number for number in value.arguments))
        for field in fields(workload)  # type: ignore[arg-type]
        if field.name.endswith("_tokens") and field.name != "output_tokens"
        for value in [getattr(workload, field.name)]
    }
    return replace(workload, **lengths)  # type: ignore[type-var]
