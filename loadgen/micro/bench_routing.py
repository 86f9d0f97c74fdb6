"""`ramet bench routing`: hits and balance of routers over many simulated replicas, on traces of block hashes.

Trees, KV events, index and policy are those of replicas and of Ray Serve's router. A replica's time is a model:
prompts are computed one after another, at a rate at which the fleet without a cache would be busy for a given share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from loadgen.http.tables import make_table
from loadgen.micro.bench_policies import replay
from loadgen.micro.fleet import Findings, Fleet, routes
from loadgen.micro.stress import Trace
from loadgen.micro.traffic import read_trace

_COLUMNS = ("replicas, router", "hits %", "of the bound %", "imbalance", "TTFT p50 s", "p99 s")

_BOUND = "one replica with all the memory"

Row = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("trace", help="JSONL whose lines have timestamp (ms) and hash_ids, as Mooncake's")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--blocks", type=int, default=500, help="in the cache of a replica; default: 500")
    parser.add_argument("--busy", type=float, default=0.6, help="share of the time, without a cache; default: 0.6")
    parser.add_argument("--weight", type=float, default=8, help="of the bounded prefix; default: 8")
    parser.add_argument("--share", type=float, default=2, help="of the bounded prefix; default: 2")
    parser.add_argument("--slack", type=float, default=32768, help="of the bounded prefix, tokens; default: 32768")
    parser.add_argument("--seeds", type=int, default=3, help="rounds with other random choices; default: 3")
    parser.add_argument("--plot", metavar="FILE", help="write the plot as PNG or SVG")
    parser.add_argument("--json", metavar="FILE", help="write the figures")


def run(arguments: argparse.Namespace) -> int:
    """Replay the trace through every router; print a table."""
    trace = read_trace(Path(arguments.trace))
    found = {}
    for replicas in arguments.replicas:
        bound = replay(trace, "foresight", replicas * arguments.blocks).hit_ratio
        found[replicas] = {_BOUND: [{"hit_ratio": bound}]} | _measure(trace, replicas, arguments)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(found) + "\n")
    _print(found)
    if arguments.plot:
        _plot(found, arguments.plot)
    return 0


def _measure(trace: Trace, replicas: int, arguments: argparse.Namespace) -> dict[str, list[Row]]:
    seconds = trace[-1][0] - trace[0][0]
    block_s = arguments.busy * seconds * replicas / sum(len(blocks) for _, blocks in trace)
    work = [(name, seed) for seed in range(arguments.seeds) for name in routes(1, 1, 1, 0, 0)]
    rows: dict[str, list[Row]] = {}
    for name, seed in track(work, description=f"{replicas} replicas"):
        route = routes(replicas, arguments.weight, arguments.share, arguments.slack, seed)[name]
        rows.setdefault(name, []).append(_row(Fleet(route, replicas, arguments.blocks, block_s).run(trace)))
    return rows


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
    Console().print(table)


def _plot(found: Mapping[int, Mapping[str, list[Row]]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (hits, balance) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
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
    figure.savefig(path, dpi=110)
