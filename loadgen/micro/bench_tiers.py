"""`ramet bench tiers`: time to first token from each tier, steps while tiers are busy, hits on a trace, in process.

The disk's figures are read from the disk: its files leave the page cache first (`posix_fadvise`, DONTNEED).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table
from loadgen.micro.drive import Drive, model_path
from loadgen.micro.intervals import interval
from loadgen.micro.tier_trace import Replay, infinite
from loadgen.micro.traffic import read_trace

PARTS = ("ttft", "steps", "trace", "restart", "writes")
_OF_TRACE = ("trace", "restart")
Figures = dict[str, dict[str, list[float]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="default: trace and restart with --trace, else ttft, steps and writes"
    )
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each figure (default: 7)")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the prefix (default: 4096)")
    parser.add_argument("--question", type=int, default=128, help="tokens behind it (default: 128)")
    parser.add_argument("--kv-store", help="redis://... or dir:PATH; default: a directory")
    parser.add_argument("--directory", type=Path, help="of the disk tier, on the disk to be measured; default: /tmp's")
    parser.add_argument("--requests", type=int, default=64, help="of each round of steps and writes (default: 64)")
    parser.add_argument("--trace", type=Path, help="JSONL with timestamp and hash_ids, as Mooncake's have")
    parser.add_argument("--trace-requests", type=int, default=2000, help="leading requests of it (default: 2000)")
    parser.add_argument("--trace-pool", type=int, default=1000, help="its blocks that the pool holds (default: 1000)")
    add_files(parser, "json", plot="write the restart's hit ratio over time")


def run(arguments: argparse.Namespace) -> int:
    figures, console = dict[str, Any](), Console()
    parts = arguments.parts or [part for part in PARTS if (part in _OF_TRACE) == (arguments.trace is not None)]
    if arguments.trace is None and (wanting := [part for part in parts if part in _OF_TRACE]):
        print(f"ramet bench: --parts {' '.join(wanting)} needs --trace", file=sys.stderr)
        return 2
    try:
        trace = read_trace(arguments.trace)[: arguments.trace_requests] if arguments.trace else []
    except ValueError as error:
        print(f"ramet bench: {error}", file=sys.stderr)
        return 2
    bench = Bench(arguments, [blocks for _, blocks in trace])
    for part in parts:
        figures[part] = getattr(bench, part)()
        console.print(*_tables(part, figures[part], bench))
    if "trace" in figures:
        console.print(_advice(figures["trace"], arguments.trace_pool), highlight=False)
    write_files(arguments, figures, plot=partial(_plot, figures["restart"]) if "restart" in figures else None)
    return 0


class Bench:
    """The figures, each a list with a value for every round."""

    def __init__(self, arguments: argparse.Namespace, trace: list[array[int]]):
        self.arguments = arguments
        self._trace = trace
        self._path = model_path(arguments.model)

    def _open(self, **options: Any) -> Drive:
        """Texts are new each time: a store may still have those of the last run."""
        return Drive(self._path, random.randrange(1 << 32), **options)

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.arguments.directory, prefix="ramet-tiers-") as name:
            yield Path(name)

    def _tiers(self, directory: Path) -> dict[str, dict[str, Any]]:
        store = self.arguments.kv_store or f"dir:{directory / 'store'}"
        return {
            "host": {"host_memory": 4.0},
            "disk": {"disk_cache": directory / "disk", "disk_space": 20.0},
            "store": {"kv_store": store},
        }

    # -- time to first token ---------------------------------------------------------------------------------

    def ttft(self) -> Figures:
        """Milliseconds to the first token of a prefix and a question: computed, from the pool, and from each tier."""
        found: Figures = {"milliseconds": {}}
        values = found["milliseconds"]
        with self._directory() as directory:
            tiers = self._tiers(directory)
            pool = 4 * (self.arguments.prefix + self.arguments.question) + 1024
            drives = {name: self._open(pool_tokens=pool, **options) for name, options in tiers.items()}
            for drive in drives.values():  # kernels, threads and rates are warm
                self._first(drive, drive.text(256))
            for _ in track(range(self.arguments.rounds), description="first tokens"):
                for name, drive in drives.items():
                    prefix = drive.text(self.arguments.prefix)
                    values.setdefault("computed", []).append(self._ask(drive, prefix))
                    values.setdefault("pool", []).append(self._ask(drive, prefix))
                    _evict(drive)
                    if name == "disk":
                        _drop_page_cache(directory / "disk")
                    values.setdefault(name, []).append(self._ask(drive, prefix, name))
                    drive.end()
            for drive in drives.values():
                drive.close()
        return found

    def _ask(self, drive: Drive, prefix: Any, tier: str | None = None) -> float:
        before = _loaded(drive, tier)
        milliseconds = self._first(drive, prefix + drive.text(self.arguments.question))
        if tier is not None and _loaded(drive, tier) - before < len(prefix) * 0.9:
            raise RuntimeError(f"the prefix did not come from {tier}")
        return milliseconds

    def _first(self, drive: Drive, prompt: Any) -> float:
        started = time.perf_counter()
        drive.add(prompt, 1)
        drive.first_tokens()
        milliseconds = 1e3 * (time.perf_counter() - started)
        drive.finish()
        return milliseconds

    # -- steps and writes ------------------------------------------------------------------------------------

    def steps(self) -> Figures:
        """Milliseconds of steps while prompts come whose prefixes the pool cannot hold, without and with all tiers."""
        return self._both(self._busy_steps, {"p50, ms": 0, "p99, ms": 1}, pool_tokens=4096)

    def writes(self) -> Figures:
        """Prompt and output tokens a second where all prefixes are used four times, so are written; none is loaded."""
        names = {"tokens/s": 0, "CPU ms a token, writing included": 1}
        return self._both(self._shared, names, pool_tokens=300 * self.arguments.requests + 4096)

    def _both(self, measure: Callable[[Drive], list[float]], names: dict[str, int], **options: Any) -> Figures:
        found: Figures = {name: {"without": [], "with": []} for name in names}
        with self._directory() as directory:
            tiers = {name: value for part in self._tiers(directory).values() for name, value in part.items()}
            drives = {"without": self._open(**options), "with": self._open(**options, **tiers)}
            for drive in drives.values():
                self._first(drive, drive.text(256))
            for number in track(range(self.arguments.rounds), description="without and with tiers"):
                order = list(drives.items())
                for which, drive in order if number % 2 else reversed(order):  # neither is always the first
                    values = measure(drive)
                    for name, place in names.items():
                        found[name][which].append(values[place])
            for drive in drives.values():
                drive.close()
        return found

    def _busy_steps(self, drive: Drive) -> list[float]:
        """Up to four requests decode, while prompts of 512 tokens come that go on from one of 16 prefixes."""
        prefixes = [drive.text(448) for _ in range(16)]
        times = []
        for number in range(self.arguments.requests):
            drive.add(prefixes[7 * number % 16] + drive.text(64), 16)
            while len(drive.core.requests) >= 4:
                times.append(drive.step())
        times += drive.finish()
        drive.end()
        cuts = statistics.quantiles(times, n=100)
        return [1e3 * cuts[49], 1e3 * cuts[98]]

    def _shared(self, drive: Drive) -> list[float]:
        started, cpu_s, tokens = time.perf_counter(), time.process_time(), 0
        for _ in range(max(self.arguments.requests // 4, 1)):
            prefix = drive.text(480)
            for _ in range(4):
                drive.add(prefix + drive.text(96), 32)
                tokens += 576 + 32
            drive.finish()
        seconds = time.perf_counter() - started
        assert drive.core.tiers is not None
        drive.core.tiers.worker.drain()
        cpu_s = time.process_time() - cpu_s
        drive.end()
        return [tokens / seconds, 1e3 * cpu_s / tokens]

    # -- a trace ---------------------------------------------------------------------------------------------

    def trace(self) -> Figures:
        """Percent of a trace's tokens that came from the cache, and tokens computed, with more and more floors."""
        found: Figures = {"cached, %": {}, "prefill tokens": {}}
        pool = self.arguments.trace_pool
        for name in ("pool", "+ host, 4 x pool", "+ disk"):
            with self._directory() as directory, Replay(pool, name, directory) as replay:
                for blocks in track(self._trace, description=name):
                    replay.ask(blocks)
                found["cached, %"][name] = [100 * sum(replay.cached) / sum(replay.tokens)]
                found["prefill tokens"][name] = [sum(replay.tokens) - sum(replay.cached)]
        found["cached, %"]["infinite"] = [100 * infinite(self._trace)]
        return found

    def restart(self) -> Figures:
        """Percent that came from the cache, in each twentieth of a trace; the server is started anew in the middle."""
        trace, found = self._trace, Figures({"cached, %": {}})
        size = max(len(trace) // 20, 1)
        for name in ("pool", "+ disk"):
            with self._directory() as directory, Replay(self.arguments.trace_pool, name, directory) as replay:
                for number, blocks in enumerate(track(trace, description=f"restart: {name}")):
                    if number == len(trace) // 2:
                        replay.restart()
                    replay.ask(blocks)
                parts = [slice(start, start + size) for start in range(0, size * 20, size)]
                shares = [100 * sum(replay.cached[p]) / max(sum(replay.tokens[p]), 1) for p in parts]
                found["cached, %"][name] = shares
        return found


def _evict(drive: Drive) -> None:
    """Evict all that can be, and wait until it is written."""
    cache = drive.core.cache
    cache.allocator.release(cache.tree.evict(cache.tree.num_pages))
    assert drive.core.tiers is not None
    drive.core.tiers.worker.drain()


def _loaded(drive: Drive, tier: str | None) -> int:
    assert drive.core.tiers is not None
    return drive.core.tiers.loaded_tokens[tier] if tier else 0


def _drop_page_cache(directory: Path) -> None:
    for path in directory.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _tables(part: str, figures: Figures, bench: Bench) -> Iterator[Any]:
    title = (getattr(Bench, part).__doc__ or "").strip()
    for name, rows in figures.items():
        if part == "restart":
            lines = [[f"{5 * i}", *(f"{values[i]:.1f}" for values in rows.values())] for i in range(20)]
            yield make_table(title, [f"{name}, from % on", *rows], lines, left=0)
            continue
        first = statistics.median(next(iter(rows.values())))
        lines = []
        if rows.keys() == {"without", "with"}:  # the machine's speed changes between rounds, hardly within one
            pairs = np.divide(rows["with"], rows["without"])
            low, high = interval(pairs, np.random.default_rng(0), np.median)
            share = f"{np.median(pairs):.3f}"
            lines.append(["with by without, in pairs; 95 %", share, f"{low:.3f} to {high:.3f}", "", f"{len(pairs)}"])
        for row, values in rows.items():
            low, high = _interval(values)
            middle = statistics.median(values)
            lines.append([row, f"{middle:.4g}", f"{low:.4g} to {high:.4g}", f"{middle / first:.3f}", f"{len(values)}"])
        yield make_table(f"{title}", [name, "median", "middle half", "beside the first", "rounds"], lines, left=1)


def _advice(figures: Figures, pool: int) -> str:
    """A sentence on the tiers that this traffic wants."""
    shares = {name: values[0] for name, values in figures["cached, %"].items()}
    kinds = {"pool": "no tier", "+ host, 4 x pool": "--host-memory of four pools", "+ disk": "--disk-cache as well"}
    best = next(name for name in kinds if shares[name] >= max(shares[kind] for kind in kinds) - 1)
    return (
        f"A pool of {pool} blocks finds {shares['pool']:.1f} %, a cache without limits {shares['infinite']:.1f} %. "
        f"This traffic wants {kinds[best]}: {shares[best]:.1f} %."
    )


def _interval(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _plot(figures: Figures, path: Path) -> None:
    with drawing(path, (7, 3.6)) as axes:
        for name, shares in figures["cached, %"].items():
            axes.plot([5 * (i + 0.5) for i in range(len(shares))], shares, marker="o", markersize=4, label=name)
        axes.axvline(50, color="k", linestyle=":", label="restart")
        axes.set(xlabel="share of the trace, %", ylabel="tokens from the cache, %")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
