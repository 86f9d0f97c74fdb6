"""`ramet bench suite`: six workloads on one or several servers, the same requests for each, in alternation."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from loadgen import options
from loadgen.arrivals import Closed
from loadgen.lengths import Distribution
from loadgen.load import Bounds
from loadgen.workloads import Workload
from loadgen.workloads.base import length
from loadgen.workloads.dialogues import Chat
from loadgen.workloads.prompts import FewShot, LongDecode, Rag, SharedPrefix, Unique


@dataclass(frozen=True)
class Case:
    """One workload of the suite.

    Attributes:
        levels: concurrencies at which it runs.
        rounds: requests for each of the users.
        least: requests at least.
    """

    title: str
    workload: Workload
    levels: tuple[int, ...]
    rounds: int
    least: int

    def requests(self, concurrency: int, scale: float) -> int:
        """How many requests one run sends; with several turns, whole conversations."""
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

# Of a run's summary: name, column, factor, digits, and whether more is better.
_COLUMNS = (
    ("output_throughput", "output tok/s", 1, 1, True),
    ("ttft_p50", "TTFT p50 ms", 1000, 0, False),
    ("tpot_p50", "TPOT p50 ms", 1000, 1, False),
    ("hit_ratio", "hit %", 100, 1, True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite's options."""
    parser.add_argument(
        "--url", nargs="+", required=True, metavar="[NAME=]URL", help="servers; the first is compared with the others"
    )
    parser.add_argument("--cases", default="".join(CASES), metavar="LETTERS", help=f"default: {''.join(CASES)}")
    parser.add_argument("--concurrency", type=options.count, nargs="+", metavar="N", help="instead of each case's own")
    parser.add_argument("--repeats", type=options.count, default=3, metavar="N", help="default: 3")
    parser.add_argument(
        "--scale", type=options.positive, default=1.0, metavar="X", help="times as many requests; default: 1"
    )
    parser.add_argument(
        "--length-scale", type=options.positive, default=1.0, metavar="X", help="times as long prompts; default: 1"
    )
    parser.add_argument(
        "--warmup", type=options.whole, default=2, metavar="N", help="unique requests before every run; default: 2"
    )
    parser.add_argument(
        "--prime",
        type=options.whole,
        default=0,
        metavar="N",
        help="requests of the workload itself before every run, not counted; default: 0, the cold ones count",
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
        help="more fields of the requests to one of the servers",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every run's summary; written after every run")
    parser.add_argument("--records", action="store_true", help="every request's record, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table, for a README")


def _named_body(text: str) -> tuple[str, dict[str, Any]]:
    name, equals, body = text.partition("=")
    if not equals:
        raise ValueError("must be NAME=JSON")
    return name, options.json_object(body)


@dataclass(frozen=True)
class _Run:
    """One run that the suite makes: the same number means the same prompts."""

    case: str
    concurrency: int
    repeat: int

    def seed(self, base: int) -> int:
        return hash((base, ord(self.case), self.concurrency, self.repeat)) & 0xFFFFFFFF


def run(arguments: argparse.Namespace) -> int:
    """Run the suite; 0 if every run has a complete answer, 1 if one has none, 130 if the user ended it."""
    from loadgen.files import write_json
    from loadgen.run import Plan, Prepared, Result, execute
    from loadgen.tables import wide_console
    from loadgen.target import TargetError

    if unknown := set(arguments.cases) - CASES.keys():
        print(f"ramet bench: --cases: no case {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    console = wide_console()
    seed = options.seed(arguments)
    rows: list[dict[str, Any]] = []

    def measure(server: Prepared, one: _Run) -> Result:
        case = CASES[one.case]
        plan = Plan(
            workload=_scaled(case.workload, arguments.length_scale),
            arrivals=Closed(one.concurrency),
            bounds=Bounds(requests=case.requests(one.concurrency, arguments.scale)),
            seed=one.seed(seed),
            warmup=arguments.warmup,
            prime=arguments.prime,
            scripted=arguments.answers == "scripted",
            patience=options.patience(arguments),
        )
        result = execute(server, plan)
        entry = {"case": one.case, "concurrency": one.concurrency, "repeat": one.repeat, "server": server.target.name}
        data = result.as_dict()
        if not arguments.records:
            del data["requests"]
        rows.append(entry | {"result": data})
        return result

    try:
        servers = _servers(arguments)
        names = [server.target.name for server in servers]
        for one in _runs(arguments):
            # Every repeat begins with another server, so that none always follows the same one.
            for server in servers[one.repeat % len(servers) :] + servers[: one.repeat % len(servers)]:
                result = measure(server, one)
                console.print(_line(one, server.target.name, result.summary), highlight=False)
                if arguments.json:
                    write_json(
                        arguments.json, {"format": "ramet-suite-1", "seed": seed, "servers": names, "runs": rows}
                    )
                if result.interrupted:
                    console.print(suite_table(rows, names))
                    return 130
    except (TargetError, ValueError, OSError) as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    console.print(suite_table(rows, names))
    if arguments.markdown:
        arguments.markdown.write_text(_markdown(rows, names), encoding="utf-8")
    return int(any(not row["result"]["summary"]["completed"] for row in rows))


def _servers(arguments: argparse.Namespace) -> list[Any]:
    """The servers, with one count of words for all: the same prompts for each."""
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
    """The workload with prompts and prefixes of another length; answers stay."""
    lengths = {
        field.name: Distribution(value.kind, tuple(scale * number for number in value.arguments))
        for field in fields(workload)  # type: ignore[arg-type]
        if field.name.endswith("_tokens") and field.name != "output_tokens"
        for value in [getattr(workload, field.name)]
    }
    return replace(workload, **lengths)  # type: ignore[type-var]


def _figure(summary: dict[str, Any], name: str) -> float | None:
    """A figure of a run by its column's name, None where the run has none."""
    if name in summary:
        return summary[name]
    kind, point = name.split("_")
    return summary["latency"].get(kind, {}).get(point)


def _line(one: _Run, server: str, summary: dict[str, Any]) -> str:
    shown = [
        f"{column} {factor * value:.{digits}f}"
        for name, column, factor, digits, _ in _COLUMNS
        if (value := _figure(summary, name)) is not None
    ]
    shown.append(f"failed {summary['requests'] - summary['completed']}")
    if summary["wrong_length"]:
        shown.append(f"{summary['wrong_length']} answers of another length")
    return f"{one.case} x{one.concurrency} #{one.repeat + 1} {server}: {', '.join(shown)}"


def _cells(rows: list[dict[str, Any]], servers: Sequence[str]) -> Iterator[list[str]]:
    """Lines of the table: median and range over the repeats; the first server against the best of the others."""
    levels = sorted({(row["case"], row["concurrency"]) for row in rows})
    for case, concurrency in levels:
        runs = {
            server: {
                row["repeat"]: row["result"]["summary"]
                for row in rows
                if (row["case"], row["concurrency"], row["server"]) == (case, concurrency, server)
            }
            for server in servers
        }
        for server in servers:
            if not (own := runs[server]):
                continue
            line = [f"({case}) {CASES[case].title}", f"{concurrency}", server]
            for name, _, factor, digits, _ in _COLUMNS:
                values = [value for summary in own.values() if (value := _figure(summary, name)) is not None]
                line.append(_median([factor * value for value in values], digits))
            line.append(f"{sum(summary['requests'] - summary['completed'] for summary in own.values())}")
            line.append(f"{sum(summary['wrong_length'] for summary in own.values())}")
            line.append(_ratios(runs, servers) if server == servers[0] else "")
            yield line


def _median(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else middle


def _ratios(runs: dict[str, dict[int, dict[str, Any]]], servers: Sequence[str]) -> str:
    """The first server's throughput and TTFT over those of the best other one: medians of paired runs."""
    shown = []
    for name, _, _, _, more in _COLUMNS[:2]:
        ratios = []
        for repeat, summary in runs[servers[0]].items():
            others = [_figure(runs[peer][repeat], name) for peer in servers[1:] if repeat in runs[peer]]
            best = (max if more else min)((value for value in others if value), default=None)
            own = _figure(summary, name)
            if best and own is not None:
                ratios.append(own / best)
        if ratios:
            shown.append(f"{statistics.median(ratios):.2f}")
    return " / ".join(shown)


_HEAD = [
    "workload",
    "at once",
    "server",
    *(column for _, column, *_ in _COLUMNS),
    "failed",
    "other length",
    "x best: tok/s / TTFT",
]


def suite_table(rows: list[dict[str, Any]], servers: Sequence[str]) -> Table:
    """The suite's one table: medians of the repeats, with their range."""
    table = Table(title="medians of the repeats (least-most); the last column: the first server over the best other")
    for number, column in enumerate(_HEAD):
        table.add_column(column, justify="right" if number > 2 else "left")
    for line in _cells(rows, servers):
        table.add_row(*line)
    return table


def _markdown(rows: list[dict[str, Any]], servers: Sequence[str]) -> str:
    lines = [_HEAD, ["---"] * len(_HEAD), *_cells(rows, servers)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
