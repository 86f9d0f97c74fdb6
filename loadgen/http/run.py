"""One measured run: probe the server, warm up, flush, scrape, load, scrape, summarise."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
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
from loadgen.http.scrape import difference, scrape
from loadgen.http.session import Session
from loadgen.http.slo import Slo
from loadgen.http.summary import before_prefix, summarise
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
        skip: number of sessions that are left out.
        warmup: uncounted requests of other text that are sent first.
        warms: whether each prefix that the workload shares is sent once, uncounted, before the run.
        flush: whether the server's cache is flushed after the warm-up.
        scripted: whether later turns build on the workload's answers instead of the server's.
    """

    workload: Workload
    arrivals: Arrivals
    bounds: Bounds
    seed: int
    skip: int = 0
    warmup: int = 0
    warms: bool = False
    flush: bool = False
    scripted: bool = False
    slo: Slo | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def sessions(self, cost: Cost) -> Iterator[Session]:
        """The sessions. Raises ValueError before the run if a file cannot be read."""
        sessions = itertools.islice(self.workload.sessions(self._source(cost)), self.skip, None)
        first = next(sessions, None)
        return iter(()) if first is None else itertools.chain([first], sessions)

    def prefixes(self, cost: Cost) -> list[Session]:
        """A session for each prefix that the sessions share."""
        return list(self.workload.prefixes(self._source(cost)))

    def _source(self, cost: Cost) -> Source:
        rng = random.Random(self.seed)
        return Source(rng, Prose(rng, cost))


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
        facts: settings and circumstances.
        figures: see `loadgen.http.summary`.
        interrupted: whether the user ended it.
    """

    records: list[Record]
    facts: dict[str, Any]
    figures: dict[str, Any]
    interrupted: bool = False


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


Ended = Callable[[Record], object]


def execute(prepared: Prepared, plan: Plan, ended: Ended = lambda record: None) -> Result:
    """Run a plan against a server. SIGINT ends it early with the results so far; a second one ends the program.

    Args:
        ended: called at the end of each request.
    """
    return asyncio.run(_execute(prepared, plan, ended))


async def _execute(prepared: Prepared, plan: Plan, ended: Ended) -> Result:
    target, started = prepared.target, datetime.now(UTC)
    sessions, rng = plan.sessions(prepared.cost), random.Random(plan.seed)
    prefixes = plan.prefixes(prepared.cost)
    # The timeout of a scrape is at most that of a request.
    scraping_s = min(_SCRAPE_S, plan.timeouts.stall_s)
    before, flushed, interrupted, lag = None, None, False, LagMeter()
    async with Client(target.url, APIS[target.api](), prepared.fields, plan.timeouts, target.key) as client:
        load = Load(client, sessions, plan.arrivals, plan.bounds, rng, plan.scripted, prepared.counter, ended)
        try:
            if plan.warmup:
                await _warm_up(prepared, plan, client)
            if plan.flush:
                flushed = await asyncio.to_thread(_flush, target)
            if plan.warms:
                await _warm(plan, client, prefixes)
            before = await scrape(target.url, target.key, scraping_s)
            async with lag:
                await load.run()
        except asyncio.CancelledError:  # by SIGINT
            interrupted = True
        after = await scrape(target.url, target.key, scraping_s)
    facts = {
        "started_at": started.isoformat(timespec="seconds"),
        "ended_by": "the user" if interrupted else load.ended_by,
        "server": {"name": target.name, "url": target.url, "api": target.api, "model": prepared.fields.model},
        "fixed_output": prepared.fields.fixed_output or "not supported: answers end where the model ends them",
        "prompt_lengths_from": prepared.counted,
        "workload": {"kind": type(plan.workload).__name__} | {k: str(v) for k, v in vars(plan.workload).items()},
        "arrivals": str(plan.arrivals),
        "seed": plan.seed,
        "sessions": load.begun,
        "before_prefix": before_prefix(load.records) if prefixes and not plan.warms else 0,
        "flushed": flushed,
        "client": lag.result(),
        "server_metrics": difference(before, after),
    }
    return Result(load.records, facts, summarise(load.records, plan.slo), interrupted)


async def _warm_up(prepared: Prepared, plan: Plan, client: Client) -> None:
    """Send text that the run does not use, with at most the run's concurrency."""
    rng = random.Random(f"warm-up {plan.seed}")
    sessions = Unique().sessions(Source(rng, Prose(rng, prepared.cost)))
    concurrency = plan.arrivals.concurrency if isinstance(plan.arrivals, Closed) else 1
    bounds = replace(plan.bounds, requests=plan.warmup, duration_s=None)
    await Load(client, sessions, Closed(min(concurrency, plan.warmup)), bounds, random.Random(plan.seed)).run()


async def _warm(plan: Plan, client: Client, prefixes: list[Session]) -> None:
    bounds = replace(plan.bounds, requests=None, duration_s=None)
    await Load(client, iter(prefixes), Closed(1), bounds, random.Random(plan.seed)).run()


def _flush(target: Target) -> bool:
    try:
        with target.client() as client:
            return client.post("/flush_cache").status_code == 200
    except httpx.HTTPError:
        return False
