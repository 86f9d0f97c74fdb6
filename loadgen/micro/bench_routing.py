"""`ramet bench routing`: hits and balance of routers over many simulated replicas, on traces of block hashes.

Trees, KV events, index and policy are those of replicas and of Ray Serve's router. A replica's time is a model:
prompts are computed one after another, at a rate at which the fleet without a cache would be busy for a given share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.progress import track

from loadgen.http.files import write_json
from loadgen.http.outputs import add_files, drawing
from loadgen.http.tables import make_table, wide_console
from loadgen.micro.bench_policies import replay
from loadgen.micro.fleet import Findings, Fleet, routes
from loadgen.micro.stress import Trace
from loadgen.micro.traffic import read_trace

_COLUMNS = ("replicas, router", "hits %", "of the bound %", "imbalance", "TTFT p50 s", "p99 s")

_BOUND, _OURS = "one replica with all the memory", "prefix and work"

# Of the trade-off's curve.
_BALANCES, _WEIGHTS = (0, 0.03, 0.1, 0.3), (1, 2, 4, 8, 16, 32, 64)

Row = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="JSONL whose lines have timestamp (ms) and hash_ids, as Mooncake's")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--blocks", type=int, default=500, help="in the cache of a replica; default: 500")
    parser.add_argument("--busy", type=float, default=0.6, help="share of the time, without a cache; default: 0.6")
    parser.add_argument("--weight", type=float, default=16, help="of a cached token; default: 16")
    parser.add_argument("--balance", type=float, default=0.1, help="of past work; default: 0.1")
    parser.add_argument("--seeds", type=int, default=3, help="rounds with other random choices; default: 3")
    add_files(
        parser,
        "plot",
        curve="plot hits over balance and waits, by weight and balance",
        json="the figures; goes on with those that it has",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay the trace through every router; print a table."""
    trace = read_trace(Path(arguments.trace))
    kept = _Kept(trace, arguments)
    found = {}
    for replicas in arguments.replicas:
        work = [(name, seed) for seed in range(arguments.seeds) for name in routes(1, 1, 1, 0)]
        rows = {_BOUND: [kept.bound(replicas)]}
        for name, seed in track(work, description=f"{replicas} replicas"):
            row = kept.row(name, replicas, arguments.weight, arguments.balance, seed)
            rows.setdefault(name, []).append(row)
        found[replicas] = rows
    _print(found)
    if arguments.plot:
        _plot(found, arguments.plot)
    if arguments.curve:
        replicas = max(arguments.replicas)
        curves: dict[float, list[Row]] = {}
        for balance, weight in track([(b, w) for b in _BALANCES for w in _WEIGHTS], description="trade-off"):
            row = kept.row(_OURS, replicas, weight, balance, 0)
            curves.setdefault(balance, []).append({**row, "weight": weight})
        bound = kept.bound(replicas)["hit_ratio"]
        _print_curve(curves, bound)
        _plot_curve(curves, bound, arguments.curve)
    return 0


class _Kept:
    """Figures of runs by their conditions, also those of earlier calls with the same file."""

    def __init__(self, trace: Trace, arguments: argparse.Namespace):
        self._trace = trace
        self._blocks, self._busy = arguments.blocks, arguments.busy
        self._path: Path | None = arguments.json
        self._rows: dict[str, Row] = {}
        if self._path and self._path.exists():
            self._rows = json.loads(self._path.read_text())

    def bound(self, replicas: int) -> Row:
        """One cache with the memory of all."""
        blocks = replicas * self._blocks
        return self._have(f"{blocks} blocks", lambda: {"hit_ratio": replay(self._trace, "foresight", blocks).hit_ratio})

    def row(self, name: str, replicas: int, weight: float, balance: float, seed: int) -> Row:
        """A router's, by name."""

        def measure() -> Row:
            known, route = routes(replicas, weight, balance, seed)[name]
            block_s = _block_s(self._trace, replicas, self._busy)
            return _row(Fleet(known, route, replicas, self._blocks, block_s).run(self._trace))

        conditions = f"{replicas} x {self._blocks} blocks, busy {self._busy:g}, weight {weight:g}, balance {balance:g}"
        return self._have(f"{conditions}, seed {seed}, {name}", measure)

    def _have(self, conditions: str, measure: Callable[[], Row]) -> Row:
        if conditions not in self._rows:
            self._rows[conditions] = measure()
            if self._path:
                write_json(self._path, self._rows)
        return self._rows[conditions]


def _block_s(trace: Trace, replicas: int, busy: float) -> float:
    """Seconds in which a replica computes a block."""
    return busy * (trace[-1][0] - trace[0][0]) * replicas / sum(len(blocks) for _, blocks in trace)


def _row(found: Findings) -> Row:
    p50, p99 = np.percentile(found.waits_s, [50, 99])
    return {"hit_ratio": found.hit_ratio, "imbalance": found.imbalance, "p50_s": float(p50), "p99_s": float(p99)}


def _median(rows: Sequence[Row], name: str) -> float:
    return float(np.median([row[name] for row in rows]))


def _print(found: Mapping[int, Mapping[str, list[Row]]]) -> None:
    table = make_table("medians of the rounds", _COLUMNS)
    for replicas, figures in found.items():
        bound = next(iter(figures.values()))[0]["hit_ratio"]
        for name, rows in figures.items():
            hits = _median(rows, "hit_ratio")
            cells = [f"{100 * hits:.1f}", f"{100 * hits / bound:.1f}"]
            if "imbalance" in rows[0]:
                cells += [f"{_median(rows, name):.2f}" for name in ("imbalance", "p50_s", "p99_s")]
            table.add_row(f"{replicas}, {name}", *cells, *[""] * (5 - len(cells)))
    wide_console().print(table)


def _print_curve(curves: Mapping[float, Sequence[Row]], bound: float) -> None:
    table = make_table("trade-off", ("balance, weight", "of the bound %", "imbalance", "TTFT p50 s", "p99 s"))
    for balance, rows in curves.items():
        for row in rows:
            hits = f"{100 * row['hit_ratio'] / bound:.1f}"
            figures = [f"{row[name]:.2f}" for name in ("imbalance", "p50_s", "p99_s")]
            table.add_row(f"{balance:g}, {row['weight']:g}", hits, *figures)
    wide_console().print(table)


def _plot(found: Mapping[int, Mapping[str, list[Row]]], path: Path) -> None:
    with drawing(path, (9, 3.4), 1, 2) as (hits, balance):
        for name in next(iter(found.values())):
            style = "k--" if name == _BOUND else "o-"
            rows = [figures[name] for figures in found.values()]
            hits.plot(list(found), [100 * _median(row, "hit_ratio") for row in rows], style, label=name, markersize=3)
            if "imbalance" in rows[0][0]:
                balance.plot(list(found), [_median(row, "imbalance") for row in rows], style, label=name, markersize=3)
        balance.axhline(1.3, color="k", linestyle=":")
        hits.set(title="hit ratio, %", ylim=(0, None))
        balance.set(title="computed blocks, busiest replica / mean", yscale="log")
        for axes in (hits, balance):
            axes.set(xscale="log", xlabel="replicas", xticks=list(found), xticklabels=list(found))
            axes.xaxis.set_minor_formatter("")
            axes.grid(alpha=0.3)
        hits.legend(fontsize=7)


def _plot_curve(rows: Mapping[float, Sequence[Row]], bound: float, path: Path) -> None:
    with drawing(path, (9, 3.4), 1, 2, sharey=True) as both:
        for axes, name in zip(both, ("imbalance", "p50_s"), strict=True):
            for balance, points in rows.items():
                hits = [100 * row["hit_ratio"] / bound for row in points]
                axes.plot([row[name] for row in points], hits, "o-", markersize=3, label=f"balance {balance:g}")
                if name == "imbalance" and not balance:
                    for row, share in zip(points, hits, strict=True):
                        axes.annotate(f"weight {row['weight']:g}", (row[name], share), fontsize=6)
            axes.grid(alpha=0.3)
        both[0].set(xlabel="computed blocks, busiest replica / mean", ylabel="hits, % of the bound")
        both[1].set(xlabel="time to first token, median, s")
        both[0].legend(fontsize=7)
