"""One measured run: probe the server, warm up, flush, scrape, load, scrape, summarise."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import platform
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import httpx

from loadgen.http.apis import APIS, RequestFields
from loadgen.http.arrivals import Arrivals, Closed
from loadgen.http.client import Client, Timeouts
from loadgen.http.lag import LagMeter
from loadgen.http.load import Bounds, Load
from loadgen.http.prose import Cost, Prose
from loadgen.http.record import Record
from loadgen.http.scrape import Scrape, difference, scrape
from loadgen.http.session import Session
from loadgen.http.slo import Slo
from loadgen.http.summary import summarise
from loadgen.http.target import Target, find_fixed_output, find_model, word_cost
from loadgen.http.tokens import TokenCounter
from loadgen.http.workloads import Source, Workload
from loadgen.http.workloads.prompts import Unique

_SCRAPE_S = 10.0


@dataclass(frozen=True)
class Plan:
    """All settings of a run but its server.

    Attributes:
        seed: of texts, lengths and arrivals.
        warmup: uncounted requests of other text that are sent first.
        flush: whether the server's cache is flushed after the warm-up.
        cut_s: requests scheduled in the first `cut_s` seconds are not counted.
        scripted: later turns build on written answers, not on the server's own.
    """

    workload: Workload
    arrivals: Arrivals
    bounds: Bounds
    seed: int
    warmup: int = 0
    flush: bool = False
    cut_s: float = 0.0
    scripted: bool = False
    slo: Slo | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def sessions(self, cost: Cost) -> Iterator[Session]:
        """The sessions. Raises ValueError now, and not during the run, for a file that cannot be read."""
        rng = random.Random(self.seed)
        sessions = self.workload.sessions(Source(rng, Prose(rng, cost)))
        first = next(sessions, None)
        return iter(()) if first is None else itertools.chain([first], sessions)


@dataclass(frozen=True)
class Prepared:
    """A probed server.

    Attributes:
        counted: the source of `cost`, in words.
        exactness: rank of that source; 0 is exact.
        counter: counts tokens where the server does not.
    """

    target: Target
    fields: RequestFields
    cost: Cost
    counted: str
    exactness: int
    counter: TokenCounter | None = None


@dataclass
class Result:
    """A run that has ended.

    Attributes:
        records: of every request but those of the warm-up.
        facts: settings and circumstances, for JSON and report.
        summary: see `loadgen.http.summary`.
        interrupted: whether the user ended it.
    """

    records: list[Record]
    facts: dict[str, Any]
    summary: dict[str, Any]
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": "ramet-bench-1", **self.facts, "summary": self.summary} | {
            "requests": [record.as_dict() for record in self.records]
        }


def prepare(
    target: Target,
    fixed_output: str | None = None,
    temperature: float = 0.0,
    extra: dict[str, Any] | None = None,
    counter: TokenCounter | None = None,
) -> Prepared:
    """Ask the server for its model and, where `fixed_output` is None, for the field it accepts. Raises TargetError."""
    model = find_model(target)
    if fixed_output is None:
        fixed_output = find_fixed_output(target, model)
    cost, counted, exactness = word_cost(target, model, Prose(random.Random(0)), counter)
    return Prepared(target, RequestFields(model, fixed_output, temperature, extra), cost, counted, exactness, counter)


Watch = Callable[[Load], AbstractContextManager[Any]]


def execute(prepared: Prepared, plan: Plan, watch: Watch | None = None) -> Result:
    """Run a plan against a server. SIGINT ends it early with the results so far; a second one ends the program.

    Args:
        watch: entered while the load runs, for a display.
    """
    return asyncio.run(_execute(prepared, plan, watch or (lambda load: nullcontext())))


async def _execute(prepared: Prepared, plan: Plan, watch: Watch) -> Result:
    target = prepared.target
    started = datetime.now(UTC)
    sessions = plan.sessions(prepared.cost)
    rng = random.Random(plan.seed)
    async with Client(target.url, APIS[target.api](), prepared.fields, plan.timeouts, target.key) as client:
        load = Load(client, sessions, plan.arrivals, plan.bounds, rng, plan.scripted, prepared.counter)
        prelude = _Prelude(prepared, plan, client)
        interrupted = await _until_interrupted(prelude.run())
        async with LagMeter() as lag:
            if not interrupted:
                with watch(load):
                    interrupted = await _until_interrupted(load.run())
        after = await prelude.scrape()
    counted = [record for record in load.records if record.scheduled_s >= plan.cut_s]
    facts = {
        "started_at": started.isoformat(timespec="seconds"),
        "ended_by": "the user" if interrupted else load.ended_by,
        "server": {"name": target.name, "url": target.url, "api": target.api, "model": prepared.fields.model},
        "request": {"temperature": prepared.fields.temperature, **(prepared.fields.extra or {})},
        "fixed_output": prepared.fields.fixed_output or "not supported: answers end where the model ends them",
        "prompt_lengths_from": prepared.counted,
        "workload": {"kind": type(plan.workload).__name__} | {k: str(v) for k, v in vars(plan.workload).items()},
        "arrivals": str(plan.arrivals),
        "bounds": vars(plan.bounds),
        "seed": plan.seed,
        "warmup_requests": plan.warmup,
        "flushed": prelude.flushed,
        "cut_s": plan.cut_s,
        "client": {"machine": f"{platform.machine()}, {platform.system()}", **lag.result()},
        "server_metrics": difference(prelude.before, after),
    }
    return Result(load.records, facts, summarise(counted, plan.slo), interrupted)


async def _until_interrupted(work: Any) -> bool:
    """Run to the end or to SIGINT; whether SIGINT came."""
    task = asyncio.ensure_future(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)

    loop = asyncio.get_running_loop()
    # Only the main thread on Unix has such a handler; elsewhere Ctrl-C ends without a report.
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGINT)
    return interrupted


@dataclass
class _Prelude:
    """The steps before the load: warm-up, flush, and the first scrape of the server's counters."""

    prepared: Prepared
    plan: Plan
    client: Client
    flushed: bool | None = None
    before: Scrape | None = None

    async def run(self) -> None:
        """Take all of them."""
        if self.plan.warmup:
            await self._warm_up()
        if self.plan.flush:
            self.flushed = await asyncio.to_thread(_flush, self.prepared.target)
        self.before = await self.scrape()

    async def scrape(self) -> Scrape | None:
        """The server's counters now; the timeout is at most a request's."""
        target = self.prepared.target
        return await scrape(target.url, target.key, min(_SCRAPE_S, self.plan.timeouts.stall_s))

    async def _warm_up(self) -> None:
        """Send text that the run does not use, at no more than the run's concurrency."""
        plan, rng = self.plan, random.Random(f"warm-up {self.plan.seed}")
        sessions = Unique().sessions(Source(rng, Prose(rng, self.prepared.cost)))
        concurrency = plan.arrivals.concurrency if isinstance(plan.arrivals, Closed) else 1
        bounds = replace(plan.bounds, requests=plan.warmup, duration_s=None)
        await Load(self.client, sessions, Closed(min(concurrency, plan.warmup)), bounds, random.Random(plan.seed)).run()


def _flush(target: Target) -> bool:
    try:
        with target.client() as client:
            return client.post("/flush_cache").status_code == 200
    except httpx.HTTPError:
        return False
