"""Plots of a run and of a sweep, by matplotlib (`pip install ramet[bench]`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.http.record import Record
from loadgen.http.summary import Level, latencies
from loadgen.http.verdict import cold_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BARS = 400
_WINDOWS = 60
_WAIT, _PREFILL, _DECODE, _FAIL = "#c9c9c9", "#e08e45", "#3b7dba", "#c0392b"


def _figure(height: float = 3.4) -> tuple[Figure, Axes]:
    # Not pyplot, which has global state and wants a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _mark_cold(axes: Axes, records: Sequence[Record]) -> None:
    """Shade the cold start: the time before any prompt came from the cache."""
    if (end := cold_s(records)) is not None and end > 0:
        axes.axvspan(0, end, color=_WAIT, alpha=0.25, zorder=0, label="cold start")
        axes.legend(fontsize=8)


def _from_zero(axes: Axes, values: Sequence[float]) -> None:
    axes.set_ylim(0, 1.08 * max(values, default=0) or 1)


def svg(figure: Figure) -> str:
    """The figure as one SVG element."""
    import matplotlib

    # Text stays text, which is small and can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def run_figures(records: Sequence[Record]) -> dict[str, Figure]:
    """The plots of a run by title, without empty ones."""
    plots: dict[str, Callable[[Sequence[Record]], Figure | None]] = {
        "Latencies": _cdfs,
        "Time to first token": _ttft_over_time,
        "Throughput and concurrency": _throughput_over_time,
        "Throughput over concurrency": _throughput_over_concurrency,
        "Hit ratio": _hits_over_time,
        "Requests": _gantt,
    }
    return {title: figure for title, plot in plots.items() if (figure := plot(records)) is not None}


def _cdfs(records: Sequence[Record]) -> Figure | None:
    found = {kind: v for kind, v in latencies(records).items() if v and kind in ("ttft", "tpot", "itl", "e2e")}
    if not found:
        return None
    figure, axes = _figure()
    for kind, values in found.items():
        ordered = 1000 * np.sort(values)
        share = np.arange(1, len(ordered) + 1) / len(ordered)
        axes.step(ordered, share, where="post", label=kind.upper())
    axes.set(xscale="log", xlabel="milliseconds", ylabel="share of requests (ITL: of gaps)", ylim=(0, 1.02))
    axes.legend()
    return figure


def _ttft_over_time(records: Sequence[Record]) -> Figure | None:
    good = [r for r in records if r.ok and r.ttft_s is not None]
    if not good:
        return None
    figure, axes = _figure()
    shared = [r.cached_tokens / r.prompt_tokens if r.cached_tokens and r.prompt_tokens else 0.0 for r in good]
    times, values = [r.scheduled_s for r in good], [1000 * (r.ttft_s or 0) for r in good]
    dots = axes.scatter(times, values, c=shared, cmap="viridis", vmin=0, vmax=1, s=14)
    figure.colorbar(dots, ax=axes, label="cached share of the prompt")
    failed = [r.scheduled_s for r in records if not r.ok]
    if failed:
        axes.plot(failed, np.zeros(len(failed)), "x", color=_FAIL, label="failed")
        axes.legend()
    _mark_cold(axes, records)
    axes.set(xlabel="seconds, when due", ylabel="TTFT, milliseconds")
    _from_zero(axes, values)
    return figure


def _throughput_over_time(records: Sequence[Record]) -> Figure | None:
    if not any(r.arrivals_s for r in records):
        return None
    edges = np.linspace(0, max(max(r.end_s for r in records), 1e-9), _WINDOWS + 1)
    figure, axes = _figure()
    axes.stairs(_throughput(records, edges), edges, color=_DECODE, fill=True, alpha=0.5, label="output tokens/s")
    axes.set(xlabel="seconds", ylabel="output tokens/s")
    axes.set_ylim(bottom=0)
    steps = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    other = axes.twinx()
    running = np.cumsum([step for _, step in steps])
    other.step([at for at, _ in steps], running, where="post", color=_PREFILL, linewidth=1, label="requests under way")
    other.set_ylabel("requests under way")
    other.set_ylim(bottom=0)
    figure.legend(loc="outside upper right", ncols=2, fontsize=8)
    return figure


def _throughput(records: Sequence[Record], edges: np.ndarray) -> np.ndarray:
    """Output tokens per second between the edges (seconds)."""
    with_text = [r for r in records if r.arrivals_s]
    times = np.concatenate([r.arrivals_s for r in with_text])
    weights = np.concatenate([np.full(len(r.arrivals_s), r.output_tokens / len(r.arrivals_s)) for r in with_text])
    tokens, _ = np.histogram(times, edges, weights=weights)
    return tokens / np.diff(edges)


def _under_way(records: Sequence[Record], edges: np.ndarray) -> np.ndarray:
    """Mean number of running requests between the edges (seconds)."""
    spent = [np.clip(np.minimum(r.end_s, edges[1:]) - np.maximum(r.sent_s, edges[:-1]), 0, None) for r in records]
    return np.sum(spent, axis=0) / np.diff(edges)


def _throughput_over_concurrency(records: Sequence[Record]) -> Figure | None:
    if not any(r.arrivals_s for r in records):
        return None
    edges = np.linspace(0, max(max(r.end_s for r in records), 1e-9), _WINDOWS + 1)
    figure, axes = _figure()
    rates = _throughput(records, edges)
    axes.plot(_under_way(records, edges), rates, "o", color=_DECODE, alpha=0.5, markersize=5)
    axes.set(xlabel=f"requests under way, mean of a window of {edges[1]:.2g} s", ylabel="output tokens/s")
    axes.set_xlim(left=0)
    _from_zero(axes, rates.tolist())
    return figure


def _hits_over_time(records: Sequence[Record]) -> Figure | None:
    told = sorted((r for r in records if r.cached_tokens is not None and r.prompt_tokens), key=lambda r: r.end_s)
    if not told:
        return None
    cached = np.array([r.cached_tokens for r in told], dtype=float)
    asked = np.array([r.prompt_tokens for r in told], dtype=float)
    times = [r.end_s for r in told]
    figure, axes = _figure()
    axes.plot(times, 100 * cached / asked, ".", color=_WAIT, label="a request")
    axes.plot(times, 100 * np.cumsum(cached) / np.cumsum(asked), color=_DECODE, label="all so far")
    _mark_cold(axes, records)
    axes.set(xlabel="seconds", ylabel="cached share of prompt tokens, %", ylim=(-2, 102))
    axes.legend()
    return figure


def _gantt(records: Sequence[Record]) -> Figure | None:
    if not records:
        return None
    shown = sorted(records, key=lambda r: r.scheduled_s)[:_MOST_BARS]
    figure, axes = _figure(height=min(2.0 + 0.045 * len(shown), 12))
    for name, color, spans in (
        ("due, not sent", _WAIT, [(r.scheduled_s, r.sent_s) for r in shown]),
        ("to the first token", _PREFILL, [(r.sent_s, r.end_s if r.first_s is None else r.first_s) for r in shown]),
        ("answer", _DECODE, [(r.end_s if r.first_s is None else r.first_s, r.end_s) for r in shown]),
    ):
        left = np.array([begin for begin, _ in spans])
        axes.barh(np.arange(len(shown)), np.array([end for _, end in spans]) - left, left=left, color=color, label=name)
    failed = [(i, r.end_s) for i, r in enumerate(shown) if not r.ok]
    if failed:
        axes.plot([at for _, at in failed], [i for i, _ in failed], "x", color=_FAIL, label="failed")
    axes.set(xlabel="seconds", ylabel="requests, in the order in which they were due")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    if len(shown) < len(records):
        axes.set_title(f"the first {len(shown)} of {len(records)}", fontsize=9)
    return figure


def sweep_figure(levels: Sequence[Level], over: str, knee: float | None) -> Figure:
    """Throughput, TTFT and TPOT over the load; hollow marks broke the service level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 7.5), layout="constrained")
    loads = [level.load for level in levels]
    rows: tuple[tuple[str, Callable[[dict[str, Any]], dict[str, float]]], ...] = (
        ("output tokens/s", lambda s: {"output": s["output_throughput"]}),
        ("TTFT, ms", lambda s: _points(s, "ttft")),
        ("TPOT, ms", lambda s: _points(s, "tpot")),
    )
    for axes, (label, read) in zip(figure.subplots(len(rows), sharex=True), rows, strict=True):
        series = [read(level.summary) for level in levels]
        for name in sorted({name for found in series for name in found}):
            values = [found.get(name, np.nan) for found in series]
            (line,) = axes.plot(loads, values, "-", label=name)
            for level, value in zip(levels, values, strict=True):
                axes.plot(level.load, value, "o", color=line.get_color(), mfc=None if level.held else "white")
        if knee is not None:
            axes.axvline(knee, color=_FAIL, linestyle=":", label=f"holds up to {knee:g}")
        axes.set_xscale("log", base=2)
        axes.set_ylabel(label)
        _from_zero(axes, [value for found in series for value in found.values()])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    axes.set_xlabel({"concurrency": "requests at once", "rate": "sessions per second"}[over])
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    return figure


def _points(summary: dict[str, Any], kind: str) -> dict[str, float]:
    found = summary["latency"].get(kind, {})
    return {point: 1000 * found[point] for point in ("p50", "p95") if point in found}
