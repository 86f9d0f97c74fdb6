"""The summary of a run: latencies, figures and warnings, as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.http.run import Result
from loadgen.http.tables import make_table

_NAMES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between pieces (ITL)",
    "e2e": "end to end",
    "queue": "queue, as the server tells",
    "prefill": "prefill, as the server tells",
    "sent_late": "sent after it was due",
}


def run_tables(result: Result) -> RenderableType:
    """Latencies, throughput, errors, warnings."""
    return Group(
        latency_table(result.summary), figure_table(result), *(Text(w, style="yellow") for w in warnings(result))
    )


def latency_table(summary: dict[str, Any]) -> Table:
    """Milliseconds by kind of latency."""
    points = ("mean", "p50", "p90", "p95", "p99", "max")
    kinds = dict(summary["latency"])
    if (late := summary["sent_late"]) and late["max"] > 0.001:
        kinds["sent_late"] = late
    rows = ([_NAMES[kind], *(f"{1000 * values[p]:.1f}" for p in points)] for kind, values in kinds.items())
    return make_table("milliseconds, from the instant at which a request was due", ("", *points), rows)


def figure_table(result: Result) -> Table:
    """All figures but latencies, by name."""
    table = make_table("", ("", ""), _figures(result).items())
    table.title, table.show_header = None, False
    return table


def _figures(result: Result) -> dict[str, str]:
    summary = result.summary
    rows = {
        "requests": f"{summary['requests']}, {summary['completed']} of them complete",
        "ended by": result.facts["ended_by"],
        "seconds": f"{summary['seconds']:.2f}",
        "mean concurrency": f"{summary['mean_concurrency']:.1f}",
        "requests/s": f"{summary['request_throughput']:.3f}",
        "input tokens/s": f"{summary['input_throughput']:.1f}",
        "output tokens/s": f"{summary['output_throughput']:.1f}",
        "input tokens": f"{summary['input_tokens']:,}",
        "output tokens": f"{summary['output_tokens']:,}",
    }
    if summary["hit_ratio"] is not None:
        rows["cached tokens"] = f"{summary['cached_tokens']:,} ({summary['hit_ratio']:.1%})"
    metrics = result.facts["server_metrics"]
    if metrics and metrics["hit_ratio"] is not None:
        rows["hit ratio by the server's counters"] = f"{metrics['hit_ratio']:.1%}"
    if goodput := summary.get("goodput"):
        rows["goodput, requests/s"] = f"{goodput['request_throughput']:.3f} ({goodput['share']:.1%} of requests)"
    used_s = {
        "client": result.facts["client"]["cpu_share"] * summary["seconds"],
        "server's own process": metrics and metrics["counters"].get("process_cpu_seconds"),
    }
    for name, cpu_s in used_s.items():
        if cpu_s and summary["output_tokens"]:
            rows[f"CPU of the {name}, us a token"] = f"{1e6 * cpu_s / summary['output_tokens']:.0f}"
    for kind, count in summary["errors"].items():
        rows[f"failed: {kind}"] = f"{count}"
    return rows


def warnings(result: Result) -> list[str]:
    """Warnings for a reader of the figures."""
    summary, found = result.summary, []
    if lag := result.facts["client"]["warning"]:
        found.append(lag)
    if summary["wrong_length"]:
        found.append(f"{summary['wrong_length']} answers have another length than was asked for")
    if summary["output_tokens_counted_by"] == ["pieces"]:
        found.append("the server reports no usage: every piece of a stream was counted as one token")
    for kind in summary["errors"]:
        example = next(record for record in result.records if record.error == kind)
        found.append(f"failed, {kind}: {example.message}" if example.message else f"failed, {kind}")
    return found
