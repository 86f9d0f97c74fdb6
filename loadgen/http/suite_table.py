"""The table of the suite: medians of repeated runs with their spread, server beside server."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from loadgen.http.tables import make_table, markdown_table

Row = dict[str, Any]


@dataclass(frozen=True)
class _Column:
    """A figure of a run: its name in the summary, the factor to the table's unit, digits; `more`: more is better."""

    title: str
    name: str
    factor: float
    digits: int
    more: bool


_COLUMNS = (
    _Column("output tok/s", "output_throughput", 1, 1, True),
    _Column("TTFT p50 ms", "ttft_p50", 1000, 0, False),
    _Column("TPOT p50 ms", "tpot_p50", 1000, 1, False),
    _Column("hit %", "hit_ratio", 100, 1, True),
)
_COMPARED = _COLUMNS[:2]
_HEAD = [
    "workload",
    "at once",
    "server",
    *(column.title for column in _COLUMNS),
    "failed",
    "other length",
    "x best: tok/s / TTFT",
]


def _figure(result: dict[str, Any], name: str) -> float | None:
    """A figure of a run, None where the run has none."""
    summary = result["summary"]
    if name == "hit_ratio" and summary[name] is None:
        # A server that does not report it for every request may have counters.
        return (result["server_metrics"] or {}).get(name)
    if name in summary:
        return summary[name]
    kind, point = name.split("_")
    return summary["latency"].get(kind, {}).get(point)


def run_line(result: dict[str, Any]) -> str:
    """The figures of one run in one line."""
    summary = result["summary"]
    shown = [
        f"{column.title} {column.factor * value:.{column.digits}f}"
        for column in _COLUMNS
        if (value := _figure(result, column.name)) is not None
    ]
    shown.append(f"failed {summary['requests'] - summary['completed']}")
    if summary["wrong_length"]:
        shown.append(f"{summary['wrong_length']} answers of another length")
    return ", ".join(shown)


def suite_table(rows: Sequence[Row], servers: Sequence[str]) -> Table:
    """For a terminal."""
    title = "medians of the repeats (least-most); the last column: the first server over the best other"
    return make_table(title, _HEAD, table_lines(rows, servers), left=3)


def markdown(rows: Sequence[Row], servers: Sequence[str]) -> str:
    """In Markdown."""
    return markdown_table(_HEAD, table_lines(rows, servers))


def table_lines(rows: Sequence[Row], servers: Sequence[str]) -> Iterator[list[str]]:
    """Cells, line by line.

    Args:
        rows: runs as `{"letter", "case", "concurrency", "repeat", "server", "result"}`.
        servers: their names; the first is compared with the best of the others.
    """
    for letter, case, concurrency in sorted({(row["letter"], row["case"], row["concurrency"]) for row in rows}):
        here = [row for row in rows if (row["letter"], row["concurrency"]) == (letter, concurrency)]
        runs = {server: {r["repeat"]: r["result"] for r in here if r["server"] == server} for server in servers}
        for server in servers:
            if own := list(runs[server].values()):
                last = _ratios(runs, servers) if server == servers[0] else ""
                yield [f"({letter}) {case}", f"{concurrency}", server, *_cells(own), last]


def _cells(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    for column in _COLUMNS:
        values = [value for result in results if (value := _figure(result, column.name)) is not None]
        yield _median([column.factor * value for value in values], column.digits)
    yield f"{sum(result['summary']['requests'] - result['summary']['completed'] for result in results)}"
    yield f"{sum(result['summary']['wrong_length'] for result in results)}"


def _median(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else middle


def _ratios(runs: dict[str, dict[int, dict[str, Any]]], servers: Sequence[str]) -> str:
    """The first server's figures over those of the best other one: medians of paired runs."""
    shown = []
    for column in _COMPARED:
        ratios = []
        for repeat, result in runs[servers[0]].items():
            others = [_figure(runs[peer][repeat], column.name) for peer in servers[1:] if repeat in runs[peer]]
            best = (max if column.more else min)((value for value in others if value), default=None)
            own = _figure(result, column.name)
            if best and own is not None:
                ratios.append(own / best)
        if ratios:
            shown.append(f"{statistics.median(ratios):.2f}")
    return " / ".join(shown)
