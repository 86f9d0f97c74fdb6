"""The details of a few runs for the terminal: percentiles of all latencies, figures, and warnings."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.harness import Results
from loadgen.harness.report import make_table
from loadgen.http.summary import POINTS, spread

_MOST_CELLS = 4
# Share of requests that compute a shared prefix from which on a warning says so.
_MANY_COLD = 0.2
_NAMES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "inter-token latency (ITL)",
    "e2e": "end to end (E2E)",
    "queue": "queue, as the server reports it",
    "prefill": "prefill, as the server reports it",
    "sent_late": "sent after it was due",
}


def details(results: Results) -> Iterator[RenderableType]:
    """Tables for each cell, where there are a few, and warnings of all."""
    for cell in results.cells.values():
        name = ", ".join(f"{key} {value}" for key, value in cell.items())
        runs = list(results.of(cell).values())
        if len(results.cells) <= _MOST_CELLS:
            yield _latencies(name, runs)
            yield _figures(runs[-1])
        for run in runs:
            yield from (Text(f"{name}: {text}", style="yellow") for text in _warnings(run))


def _latencies(title: str, runs: list[dict[str, Any]]) -> Table:
    """Milliseconds by kind of latency, over all repeats."""
    table = make_table(f"{title}: milliseconds since a request was due", ("", *POINTS))
    for kind, name in _NAMES.items():
        points = spread([value for run in runs for value in run[kind]])
        if points is not None and not (kind == "sent_late" and points["max"] < 0.001):
            table.add_row(name, *(f"{1000 * points[point]:.1f}" for point in POINTS))
    return table


def _figures(run: dict[str, Any]) -> Table:
    """All figures of a run but its latencies."""
    rows = {
        "requests": f"{run['count']}, {run['completed']} of them complete; ended by {run['facts']['ended_by']}",
        "seconds": f"{run['seconds']:.2f}",
        "mean concurrency": f"{run['mean_concurrency']:.1f}",
        "requests/s": f"{run['request_throughput']:.3f}",
        "input tokens": f"{run['input_tokens']:,} ({run['input_throughput']:.1f}/s)",
        "output tokens": f"{run['output_tokens']:,} ({run['output_throughput']:.1f}/s)",
    }
    if run["hit_ratio"] is not None:
        rows["cached prompt tokens"] = f"{run['hit_ratio']:.1%}"
    if "goodput" in run:
        rows["goodput, requests/s"] = f"{run['goodput_throughput']:.3f} ({run['goodput']:.1%} of requests)"
    metrics = run["facts"]["server_metrics"]
    used_s = {
        "client": run["facts"]["client"]["cpu_share"] * run["seconds"],
        "server's own process": metrics and metrics["counters"].get("process_cpu_seconds"),
    }
    for name, cpu_s in used_s.items():
        if cpu_s and run["output_tokens"]:
            rows[f"CPU of the {name}, us a token"] = f"{1e6 * cpu_s / run['output_tokens']:.0f}"
    if run.get("unfinished"):  # earlier files lack it
        rows["running when the run ended"] = f"{run['unfinished']}"
    rows |= {f"failed: {kind}": f"{number}" for kind, number in run["errors"].items()}
    table = make_table("", ("", ""), rows.items())
    table.show_header = False
    return table


def _warnings(run: dict[str, Any]) -> Iterator[str]:
    if lag := run["facts"]["client"]["warning"]:
        yield lag
    if run["wrong_length"]:
        yield f"{run['wrong_length']} answers have another length than was asked for"
    if run["output_tokens_counted_by"] == ["pieces"]:
        yield "the server reports no usage: every piece of a stream was counted as one token"
    if (cold := run["facts"].get("before_prefix", 0)) > _MANY_COLD * run["completed"]:
        yield (
            f"{cold} of {run['completed']} complete requests came before their shared prefix was in the cache; "
            "--warm-prefixes sends each prefix once before the run"
        )
    if run["facts"].get("same_lines"):
        yield "every load sent the same lines, so later loads find them cached; --requests N takes other lines for each"
    for kind, message in run["error_examples"].items():
        yield f"failed, {kind}: {message}" if message else f"failed, {kind}"
