"""`ramet bench fleet`: hits, balance and time to first token of routers over servers on this machine.

Each server has the same small pool. The bound is one server with the memory of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from loadgen.fleet.fronts import OTHERS, Front, RayCluster, fronts
from loadgen.fleet.replicas import Counts, Replica, counts, engine_options, flush, make_model, running_replicas
from loadgen.http import options
from loadgen.http.arrivals import Arrivals, Closed, Recorded
from loadgen.http.load import Bounds
from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.run import Plan, Prepared, Result, execute, prepare
from loadgen.http.tables import make_table, wide_console
from loadgen.http.target import Target
from loadgen.http.workloads import Workload
from loadgen.http.workloads.base import length
from loadgen.http.workloads.dialogues import Chat
from loadgen.http.workloads.prompts import SharedPrefix
from loadgen.http.workloads.trace import Trace
from runtime.config import default_cache_dir
from runtime.models.default_model import fetch_default

_BOUND = "one server with all the memory"
_USERS = 8
_ANSWER = length("8")
# Blocks of 512 tokens become pages of 16.
_SHRINK, _LONGEST = 1 / 32, 3000
_TRIES = 200

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=options.count, nargs="+", default=[2, 4])
    parser.add_argument("--pool-tokens", type=options.count, default=6144, help="of each server; default: 6144")
    parser.add_argument("--workloads", nargs="+", default=["prefixes", "chats", "trace"])
    parser.add_argument("--trace", type=Path, help="of Mooncake's form; without it that workload is left out")
    parser.add_argument("--window", type=options.positive, default=240, help="seconds of the trace; default: 240")
    parser.add_argument("--speed", type=options.positive, default=8, help="of the trace; default: 8")
    parser.add_argument("--rounds", type=options.count, default=3, help="with other prompts each; default: 3")
    for name in (*OTHERS, "dynamo", "ray"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="an interpreter that has it; without, it is left out")
    add_files(parser, "plot", json="the figures; goes on with those that it has")


def run(arguments: argparse.Namespace) -> int:
    """Measure what the JSON file lacks; print a table."""
    rows: list[Row] = []
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())["runs"]
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = fetch_default(default_cache_dir())
        model = make_model(Path(directory), tokenizer)
        for number in arguments.replicas:
            for row in _measure(arguments, number, model, tokenizer, rows):
                rows.append(row)
                write_files(arguments, {"runs": rows})
    if not rows:
        print("ramet bench: nothing to measure", file=sys.stderr)
        return 2
    _print(rows)
    write_files(arguments, {"runs": rows}, plot=partial(_plot, rows))
    return int(any(row["failed"] for row in rows))


def _measure(
    arguments: argparse.Namespace, number: int, model: Path, tokenizer: Path, have: Sequence[Row]
) -> Iterator[Row]:
    """Rows of all routers over so many servers, but for those that are there already."""
    done = {_key(row) for row in have}
    workloads = _workloads(arguments)
    pythons = {name: value for name in (*OTHERS, "dynamo") if (value := getattr(arguments, name.replace("-", "_")))}

    def todo(name: str) -> list[Row]:
        work = ({"router": name, "workload": kind, "round": i} for i in range(arguments.rounds) for kind in workloads)
        return [row for row in ({"replicas": number, **item} for item in work) if _key(row) not in done]

    def over(replicas: Sequence[Replica], name: str, front: Front) -> Iterator[Row]:
        for row in track(todo(name), description=f"{number} replicas, {name}"):
            flush(replicas)
            prepared = _prepared(replicas[0].url)
            with front(replicas) as url:
                yield _run(row, prepared, url, workloads, lambda: dict(counts(one.url) for one in replicas))

    pool = arguments.pool_tokens
    if todo(_BOUND):
        with running_replicas(1, engine_options(model, number * pool)) as whole:
            yield from over(whole, _BOUND, fronts(tokenizer, {}, 0)["round robin"])
    ways = fronts(tokenizer, pythons, 0)
    if any(todo(name) for name in ways):
        with running_replicas(number, engine_options(model, pool)) as replicas:
            for name, front in ways.items():
                yield from over(replicas, name, front)
    if arguments.ray and todo("ray serve"):
        # Nobody can flush all of its caches, so a run finds the pages of the one before, whose prompts were others.
        with RayCluster(arguments.ray, number, engine_options(model, pool)) as ray:
            for row in track(todo("ray serve"), description=f"{number} replicas, ray serve"):
                yield _run(row, _prepared(ray.url), ray.url, workloads, lambda: _counts_behind(ray.url, number))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("replicas", "router", "workload", "round"))


def _workloads(arguments: argparse.Namespace) -> dict[str, tuple[Workload, Arrivals, int | None]]:
    """By name: what is sent, when, and how many requests at most."""
    prefixes = SharedPrefix(
        groups=16, questions=6, prefix_tokens=length("512"), prompt_tokens=length("32"), output_tokens=_ANSWER
    )
    chats = Chat(prefix_tokens=length("256"), prompt_tokens=length("lognormal:64:32:8:256"), output_tokens=_ANSWER)
    found: dict[str, tuple[Workload, Arrivals, int | None]] = {
        "prefixes": (prefixes, Closed(_USERS), prefixes.requests),
        "chats": (chats, Closed(2 * _USERS), 192),
    }
    if arguments.trace:
        trace = Trace(
            arguments.trace, speed=arguments.speed, window=arguments.window, shrink=_SHRINK, max_tokens=_LONGEST
        )
        found["trace"] = (trace, Recorded(), None)
    return {name: found[name] for name in arguments.workloads if name in found}


def _prepared(url: str) -> Prepared:
    return prepare(Target("replica", url, "completions"), fixed_output="ignore_eos")


def _run(
    row: Row,
    prepared: Prepared,
    url: str,
    workloads: Mapping[str, tuple[Workload, Arrivals, int | None]],
    look: Callable[[], dict[str, Counts]],
) -> Row:
    """One run, whose seed is its round's; `look` reads the counts of all servers."""
    workload, arrivals, most = workloads[row["workload"]]
    plan = Plan(workload, arrivals, Bounds(requests=most), seed=row["round"])
    before = look()
    result = execute(dataclasses.replace(prepared, target=Target(row["router"], url, "completions")), plan)
    after = look()
    return row | _figures(result, [after[name] - before[name] for name in after])


def _figures(result: Result, worked: Sequence[Counts]) -> Row:
    queried = sum(one.queried for one in worked)
    computed = [one.computed for one in worked]
    ttft = [record.ttft_s for record in result.records if record.ok and record.ttft_s is not None]
    p50, p99 = np.percentile(ttft, [50, 99]) if ttft else (np.nan, np.nan)
    return {
        "requests": len(result.records),
        "failed": sum(not record.ok for record in result.records),
        "hit_ratio": sum(one.cached for one in worked) / max(queried, 1),
        "imbalance": max(computed) * len(computed) / max(sum(computed), 1),
        "ttft_p50_s": float(p50),
        "ttft_p99_s": float(p99),
    }


def _counts_behind(url: str, number: int) -> dict[str, Counts]:
    """The counts of replicas that one URL reaches in turn. Raises RuntimeError if some are never met."""
    found: dict[str, Counts] = {}
    for _ in range(_TRIES):
        found.update([counts(url)])
        if len(found) == number:
            return found
    raise RuntimeError(f"{url} reaches {len(found)} of {number} replicas")


def _medians(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, tuple[float, float, float]]]:
    """By replicas, workload and router: median, least and most over the rounds of each figure."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["replicas"], row["workload"], row["router"]), []).append(row)
    names = ("hit_ratio", "share", "imbalance", "ttft_p50_s", "ttft_p99_s")
    bounds = {_key(row): row["hit_ratio"] for row in rows}
    for row in rows:
        bound = bounds.get((row["replicas"], _BOUND, row["workload"], row["round"]), 0)
        row["share"] = row["hit_ratio"] / bound if bound else np.nan
    return {
        key: {name: tuple(float(f([row[name] for row in group])) for f in (np.median, min, max)) for name in names}  # type: ignore[misc]
        for key, group in grouped.items()
    }


def _print(rows: Sequence[Row]) -> None:
    columns = ("replicas, workload, router", "hits %", "of the bound %", "imbalance", "TTFT p50 ms", "p99 ms")
    factors = (100, 100, 1, 1000, 1000)
    table = make_table("medians of the rounds, and their range", columns)
    for key, figures in sorted(_medians(rows).items(), key=lambda item: str(item[0][:2])):
        cells = []
        for factor, (middle, least, most) in zip(factors, figures.values(), strict=True):
            digits = 2 if factor == 1 else 1 if factor == 100 else 0
            low, high = f"{factor * least:.{digits}f}", f"{factor * most:.{digits}f}"
            cells.append(f"{factor * middle:.{digits}f}" + (f" [{low}, {high}]" if low != high else ""))
        table.add_row(", ".join(map(str, key)), *cells)
    wide_console().print(table)


def _plot(rows: Sequence[Row], path: Path) -> None:
    medians = _medians(rows)
    groups = sorted({key[:2] for key in medians})
    routers = list(dict.fromkeys(key[2] for key in medians))
    with drawing(path, (9, 8), 3, 1, sharex=True) as panels:
        for axes, (name, title, factor) in zip(
            panels,
            (
                ("hit_ratio", "hit ratio, %", 100),
                ("imbalance", "computed tokens, busiest / mean", 1),
                ("ttft_p50_s", "time to first token, median, ms", 1000),
            ),
            strict=True,
        ):
            for place, router in enumerate(routers):
                at = [number + (place - len(routers) / 2) * 0.8 / len(routers) for number in range(len(groups))]
                figures = [medians.get((*group, router), {}).get(name, (np.nan,) * 3) for group in groups]
                middle = factor * np.array([figure[0] for figure in figures])
                spread = [[factor * (f[0] - f[1]) for f in figures], [factor * (f[2] - f[0]) for f in figures]]
                axes.bar(at, middle, 0.8 / len(routers), yerr=spread, label=router, align="edge", error_kw={"lw": 0.7})
            axes.set(title=title)
            axes.grid(alpha=0.3, axis="y")
        panels[1].axhline(1.3, color="k", linestyle=":")
        panels[-1].set_xticks(range(len(groups)), [f"{number} x {workload}" for number, workload in groups])
        panels[0].figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside upper center")
