"""`ramet bench scheduler`: time to first token under each admission policy (simulated), and the cost of scheduling.

Scheduler, tree and page tables are real, the model is simulated: a step takes as long as a cost model says, so that
hours of traffic pass in seconds and only the policy differs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadgen.http.outputs import add_files, write_files
from loadgen.http.tables import make_table
from loadgen.http.workloads.trace import Row, read_trace
from runtime.config import CacheConfig, SchedulePolicy, SchedulerConfig
from runtime.engine.scheduler import Scheduler
from runtime.kv.cache import PagedCache
from runtime.kv.pool import KVPool
from runtime.params import SamplingParams
from runtime.request import Request, Sequence, Work
from runtime.reuse.prefix import PrefixStrategy

_VOCABULARY = 1 << 17
_BLOCK_TOKENS = 512  # of Mooncake's hashes
_STEP_S, _ROW_S = 0.008, 0.00003  # simulated time of a step, and of each of its tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", help="also replay a trace in Mooncake's or Azure's format")
    parser.add_argument("--window", type=float, default=600.0, help="seconds of the trace that are replayed")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0], help="times as fast as recorded")
    parser.add_argument("--requests", type=int, default=4000, help="in the closed loop")
    parser.add_argument("--concurrency", type=int, default=100, help="clients of the closed loop")
    parser.add_argument("--cold", type=float, default=0.05, help="share of uncached requests")
    parser.add_argument("--pool-tokens", type=int, default=400_000, help="size of the cache")
    parser.add_argument("--running", type=int, default=32, help="requests that decode together")
    parser.add_argument("--overtake-share", type=float, default=0.1, help="for the policy balanced")
    parser.add_argument("--waiting", type=int, nargs="*", default=[10, 100, 1000, 10_000], help="lengths of the queue")
    parser.add_argument("--nodes", type=int, nargs="*", default=[10, 1000, 100_000], help="sizes of the tree")
    parser.add_argument("--seed", type=int, help="default: another one every time")
    add_files(parser, "json")


def run(arguments: argparse.Namespace) -> int:
    """Simulate every policy on every load, then time `schedule`; prints tables."""
    seed = random.randrange(1 << 31) if arguments.seed is None else arguments.seed
    loads: dict[str, Callable[[], Load]] = {
        f"{arguments.concurrency} clients, {arguments.cold:.0%} cold": lambda: ClosedLoop(
            random.Random(seed), arguments.requests, arguments.concurrency, arguments.cold
        )
    }
    if arguments.trace:
        rows = [row for row in read_trace(Path(arguments.trace)) if row.at_s < arguments.window]
        for speed in arguments.speeds:
            loads[f"{Path(arguments.trace).stem}, {speed:g} x"] = lambda speed=speed: Replay(rows, speed)  # type: ignore[misc]
    console = Console()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, make in loads.items():
        figures[name] = {}
        for policy in track(get_args(SchedulePolicy), description=name):
            figures[name][policy] = Simulation(arguments, policy, make()).run()
        console.print(_table(name, figures[name]))
    costs = _costs(arguments, random.Random(seed))
    console.print(_cost_table(costs))
    write_files(arguments, {"seed": seed, "ttft": figures, "cost": costs})
    return 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load: its arrival time in seconds, its prompt, and the number of tokens it will generate."""

    at_s: float
    tokens: array[int]
    output: int


class Load:
    """A source of requests.

    Attributes:
        opening: requests with arrival times known from the start.
    """

    opening: Iterable[Arrival] = ()

    def after(self, now: float) -> Arrival | None:
        """The request that follows at once when one ends at `now`."""
        del now
        return None


class ClosedLoop(Load):
    """Clients that send their next request when the last one has ended.

    A request has one of 16 prefixes of 2,048 tokens, or a cold one of its own, and 64 tokens more. The clients begin
    one by one within ten seconds.
    """

    def __init__(self, draw: random.Random, requests: int, clients: int, cold: float):
        self._draw, self._cold = draw, cold
        self._prefixes = [self._text(2048) for _ in range(16)]
        self._left = requests - clients
        self.opening = [self._request(10 * i / clients) for i in range(clients)]

    def after(self, now: float) -> Arrival | None:
        """The client's next request, until all were sent."""
        self._left -= 1
        return self._request(now) if self._left >= 0 else None

    def _request(self, now: float) -> Arrival:
        cold = self._draw.random() < self._cold
        prefix = self._text(2048) if cold else self._draw.choice(self._prefixes)
        return Arrival(now, prefix + self._text(64), self._draw.randrange(32, 97))

    def _text(self, length: int) -> array[int]:
        return array("i", self._draw.choices(range(_VOCABULARY), k=length))


class Replay(Load):
    """A recorded trace with its own times. The same block hash gives the same tokens."""

    def __init__(self, rows: Iterable[Row], speed: float):
        self.opening = (Arrival(row.at_s / speed, _tokens(row), row.output_tokens) for row in rows)


def _tokens(row: Row) -> array[int]:
    tokens = array("i")
    for block in row.blocks or (hash(row),):
        size = min(_BLOCK_TOKENS, row.input_tokens - len(tokens)) if row.blocks else row.input_tokens
        made = np.random.default_rng(abs(block)).integers(0, _VOCABULARY, max(size, 0), dtype=np.int32)
        tokens.frombytes(made.tobytes())
    return tokens


@dataclass(slots=True)
class _Ended:
    ttft_s: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0


class Simulation:
    """One policy under one load, on a clock of its own."""

    def __init__(self, arguments: argparse.Namespace, policy: SchedulePolicy, load: Load):
        self.now = 0.0
        self._load = load
        self._sequence = 0
        self.cache, self.scheduler = _make(arguments, policy, lambda: self.now)
        self._due: list[tuple[float, int, Arrival]] = []
        self._stream: Iterator[Arrival] = iter(load.opening)
        self._ended = _Ended()

    def run(self) -> dict[str, float]:
        """Run the load; TTFT (mean, p50, p99, max) and total time, in seconds, and the cached share of prompts."""
        self._schedule(next(self._stream, None))
        while self._due or self.scheduler.running or self.scheduler.waiting or self.scheduler.blocked:
            self._receive()
            work = self.scheduler.schedule()
            if not work:
                self.now = max(self.now, self._due[0][0])
                continue
            rows = sum(item.count for item in work)
            self.now += _STEP_S + rows * _ROW_S
            for item in work:
                self._advance(item)
        times = np.array(self._ended.ttft_s)
        return {
            "mean": float(times.mean()),
            "p50": float(np.percentile(times, 50)),
            "p99": float(np.percentile(times, 99)),
            "max": float(times.max()),
            "cached": self._ended.cached / self._ended.prompt,
            "seconds": self.now,
        }

    def _schedule(self, arrival: Arrival | None) -> None:
        if arrival is not None:
            self._sequence += 1
            heappush(self._due, (arrival.at_s, self._sequence, arrival))

    def _receive(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            at_s, sequence, arrival = heappop(self._due)
            self.scheduler.add(_request(sequence, arrival.tokens, arrival.output, at_s, self.cache))
            self._schedule(next(self._stream, None))

    def _advance(self, work: Work) -> None:
        request = work.request
        _book(self.scheduler, work)
        if not work.samples:
            return
        request.tokens.append(random.randrange(_VOCABULARY))
        if not request.first_token_s:
            request.first_token_s = self.now
            self._ended.ttft_s.append(self.now - request.arrival_s)
            self._ended.cached += request.cached_tokens
            self._ended.prompt += request.prompt_len
        if len(request.tokens) >= request.max_tokens:
            self.scheduler.remove(request)
            self._schedule(self._load.after(self.now))


def _make(
    arguments: argparse.Namespace, policy: SchedulePolicy, clock: Callable[[], float] = time.monotonic
) -> tuple[PagedCache, Scheduler]:
    pool = KVPool(1, arguments.pool_tokens // 16, 16, 1, 1, torch.bfloat16, torch.device("cpu"))
    cache = PagedCache(pool, CacheConfig(), clock=clock)
    config = SchedulerConfig(
        schedule_policy=policy,
        overtake_share=arguments.overtake_share,
        max_running=arguments.running,
        max_waiting=1 << 20,
    )
    return cache, Scheduler(config, cache, 2048)


def _request(serial: int, tokens: array[int], output: int, at_s: float, cache: PagedCache) -> Request:
    nothing: Any = None  # no tokens are chosen
    return Request(
        rid=f"{serial}",
        sequence=Sequence(tokens),
        prompt_len=len(tokens),
        sampling=SamplingParams(),
        stop_ids=frozenset(),
        max_tokens=len(tokens) + max(output, 1),
        strategy=PrefixStrategy(cache, 1),
        decoding=nothing,
        serial=serial,
        arrival_s=at_s,
    )


def _book(scheduler: Scheduler, work: Work) -> None:
    prefills = work.prefills
    work.request.strategy.book(work, [], 0.0)
    if prefills:
        scheduler.computed(work.request)


def _costs(arguments: argparse.Namespace, draw: random.Random) -> dict[str, dict[str, float]]:
    """Microseconds of one `schedule` while others decode, by policy: over queue lengths, then tree sizes."""
    found: dict[str, dict[str, float]] = {}
    cases = [(f"{n} wait", n, 1000) for n in arguments.waiting] + [(f"{n} nodes", 100, n) for n in arguments.nodes]
    for name, waiting, nodes in track(cases, description="timing"):
        found[name] = {policy: _cost(arguments, draw, policy, waiting, nodes) for policy in get_args(SchedulePolicy)}
    return found


def _cost(
    arguments: argparse.Namespace, draw: random.Random, policy: SchedulePolicy, waiting: int, nodes: int
) -> float:
    """Microseconds of a `schedule` that finds one free place: the others decode, and one request has just ended."""
    arguments = argparse.Namespace(**{**vars(arguments), "pool_tokens": max(16 * nodes + 200_000, 400_000)})
    cache, scheduler = _make(arguments, policy)
    pages = cache.allocator.allocate(nodes)
    assert pages is not None
    for i in range(nodes):
        cache.tree.insert(array("i", [_VOCABULARY + i] * 16).tobytes(), pages[i : i + 1])
    prefixes = [array("i", draw.choices(range(_VOCABULARY), k=1024)) for _ in range(16)]
    times = []
    for i in range(waiting + arguments.running):
        tokens = draw.choice(prefixes) + array("i", draw.choices(range(_VOCABULARY), k=64))
        scheduler.add(_request(i, tokens, 1 << 20, 0.001 * i, cache))
    for step in range(150):
        if scheduler.running and len(scheduler.running) == arguments.running:
            scheduler.remove(scheduler.running[0])
            tokens = draw.choice(prefixes) + array("i", draw.choices(range(_VOCABULARY), k=64))
            scheduler.add(_request(1 << 20 | step, tokens, 1 << 20, 0.001 * step, cache))
        start = time.perf_counter()
        work = scheduler.schedule()
        times.append(time.perf_counter() - start)
        for item in work:
            _book(scheduler, item)
            if not item.request.num_remaining:
                item.request.tokens.append(1)
    return 1e6 * statistics.median(times[50:])


def _table(name: str, figures: dict[str, dict[str, float]]) -> Table:
    columns = ("policy", "mean", "p50", "p99", "max", "prompt tokens cached", "all done after")
    table = make_table(f"{name}: time to first token, seconds (simulated)", columns)
    for policy, row in figures.items():
        times = (f"{row[key]:.2f}" for key in ("mean", "p50", "p99", "max"))
        table.add_row(policy, *times, f"{row['cached']:.1%}", f"{row['seconds']:.0f} s")
    return table


def _cost_table(costs: dict[str, dict[str, float]]) -> Table:
    rows = ([name, *(f"{value:.0f}" for value in row.values())] for name, row in costs.items())
    return make_table("one pass of the scheduler, microseconds (median)", ("", *get_args(SchedulePolicy)), rows)
