"""`ramet bench serve`: load on any OpenAI-compatible server: latency, throughput, cache hits, goodput, errors."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, create_model, field_validator
from rich.console import RenderableType
from tqdm import tqdm

from loadgen.harness import Bench, BenchError, Cell, Figure, Results, repeats_of, warmup_of
from loadgen.harness.machine import cpu_seconds
from loadgen.http.arrivals import Arrivals, Closed, Gamma, Recorded
from loadgen.http.client import Timeouts
from loadgen.http.details import details
from loadgen.http.load import Bounds
from loadgen.http.run import Plan, Prepared, execute, prepare
from loadgen.http.slo import Slo
from loadgen.http.target import Target
from loadgen.http.tokens import TokenCounter
from loadgen.http.workloads import WORKLOADS, Workload, fields_of, make_workloads

KEY_VARIABLE = "RAMET_BENCH_API_KEY"
_CONCURRENCY = 8


class ServeBench(Bench):
    """Latency, throughput and cache hits of servers under load."""

    figures = (
        Figure("output_throughput", "output tok/s", versus="ratio", plotted=True),
        Figure("ttft", "TTFT p50, ms", ".0f", 1000, versus="ratio", plotted=True),
        Figure("ttft", "TTFT p99, ms", ".0f", 1000, statistic="p99", interval=False),
        Figure("tpot", "TPOT p50, ms", factor=1000, plotted=True),
        Figure("tpot", "TPOT p99, ms", factor=1000, statistic="p99", interval=False),
        Figure("e2e", "E2E p50, s", ".2f", interval=False),
        Figure("cpu", "CPU, s", ".2f", versus="ratio", plotted=True),
        Figure("hit_ratio", "hits, %", factor=100),
        Figure("goodput", "goodput, %", factor=100),
        Figure("failed", "failed", ".0f", statistic="sum", interval=False),
        Figure("wrong_length", "other length", ".0f", statistic="sum", interval=False),
    )

    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)

    url: tuple[str, ...] = Field(
        ("http://127.0.0.1:30000",), min_length=1, description="servers as URL or NAME=URL, compared with the first"
    )
    api: Literal["chat", "completions", "generate"] | None = Field(
        None, description="the API (default: chat for --workload file, else completions)"
    )
    model: str | None = Field(None, description="the model's name (default: the first in /v1/models)")
    api_key: str | None = Field(
        default_factory=lambda: os.environ.get(KEY_VARIABLE),
        exclude=True,
        description=f"a bearer token; default: ${KEY_VARIABLE}",
    )
    temperature: float = Field(0.0, ge=0, description="sampling temperature; 0 is greedy")
    fixed_output: Literal["auto", "ignore_eos", "min_tokens", "off"] = Field(
        "auto", description="field that fixes the length of answers; auto: the first that the server accepts"
    )
    tokenizer: Path | None = Field(
        None, description="the model's tokenizer.json or its directory, to count tokens where the server does not"
    )
    extra_body: tuple[str, ...] = Field(
        (), description="further fields of every request as JSON, or of those to one server as NAME=JSON"
    )
    timeout: float = Field(600.0, gt=0, description="seconds of a request")
    stall_timeout: float = Field(300.0, gt=0, description="seconds without a byte")

    workload: tuple[str, ...] = Field(("shared-prefix",), min_length=1, description=", ".join(WORKLOADS))
    vary: tuple[str, ...] = Field(
        (), description="an option of the workload and its values, measured in turn: prompt-tokens 500 1000 2000"
    )
    answers: Literal["server", "scripted"] = Field("server", description="answers on which later turns build")

    concurrency: tuple[int, ...] = Field((), description=f"users of a closed loop (default: {_CONCURRENCY})")
    rate: tuple[float, ...] = Field((), description="sessions per second of an open loop")
    burstiness: float = Field(1.0, gt=0, description="of --rate: 1 is Poisson, below 1 is burstier")
    requests: int | None = Field(None, gt=0, description="requests of a run (default: by workload and concurrency)")
    duration: float | None = Field(None, gt=0, description="seconds after which no request is sent")
    grace: float = Field(30.0, ge=0, description="seconds for running requests after --duration")
    max_outstanding: int = Field(1024, gt=0, description="most requests running at once")
    warmup_requests: int = Field(0, ge=0, description="uncounted requests of other text before each run")
    warm_prefixes: bool = Field(False, description="send each shared prefix once, uncounted, before each run")
    flush: bool = Field(False, description="empty the server's cache before each run")
    goodput: tuple[str, ...] = Field((), description="service levels as LATENCY:MS, of ttft, tpot, itl and e2e")
    process: tuple[str, ...] = Field(
        (), description="NAME=PID: a server's process on this machine, whose CPU time is measured, warm-up included"
    )
    records: bool = Field(False, description="record each request in --json")

    _pids: dict[str, int]
    _servers: dict[str, Prepared]
    _workloads: dict[tuple[str, Any], Workload]  # by name and value of --vary
    _interrupted: bool = False
    # Sessions of finite workloads that were sent, and that each load leaves out: by workload, and by load and repeat.
    _sent: dict[tuple[str, Any], int] = PrivateAttr(default_factory=dict)
    _skipped: dict[int, int] = PrivateAttr(default_factory=dict)

    @field_validator("goodput", "extra_body", "workload", "vary", "concurrency", "rate")
    @classmethod
    def _is_valid(cls, values: tuple[Any, ...], info: Any) -> tuple[Any, ...]:
        """Refuse wrong values before a server is asked."""
        if info.field_name == "goodput":
            Slo.parse(values)
        elif info.field_name == "vary":
            if values and (len(values) < 2 or _field(values[0]) not in fields_of(*WORKLOADS)):
                raise ValueError(f"{values[0]} is no option of a workload with values behind it")
        elif info.field_name == "extra_body":
            _bodies(values)
        elif info.field_name == "workload":
            if unknown := [name for name in values if name not in WORKLOADS]:
                raise ValueError(f"there is no workload {unknown[0]}, only {', '.join(WORKLOADS)}")
        elif any(value <= 0 for value in values):
            raise ValueError("must be above 0")
        return values

    def baseline(self) -> tuple[str, Any] | None:
        return ("server", _named(self.url[0])[0]) if len(self.url) > 1 else None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Probe the servers. The most exact token counts among them make the prompts for all."""
        given = {name: value for name in fields_of(*WORKLOADS) if (value := getattr(self, name)) is not None}
        names = [_named(url)[0] for url in self.url]
        try:
            self._pids = {name: int(pid) for name, _, pid in (text.partition("=") for text in self.process)}
        except ValueError as error:
            raise BenchError(f"--process: {error}") from None
        if unknown := self._pids.keys() - names:
            raise BenchError(f"--process: there is no server {min(unknown)}")
        try:
            self._workloads = {
                (name, value): workload
                for value in map(_number, self.vary[1:] or ("",))
                for name, workload in make_workloads(self.workload, given | self._varied(value)).items()
            }
            counter = None if self.tokenizer is None else TokenCounter(self.tokenizer)
        except ValueError as error:
            raise BenchError(str(error)) from None
        found = {name: self._prepared(name, url, counter) for name, url in map(_named, self.url)}
        best = min(found.values(), key=lambda server: server.exactness)
        self._servers = {name: replace(server, cost=best.cost, counted=best.counted) for name, server in found.items()}
        yield

    def _prepared(self, name: str, url: str, counter: TokenCounter | None) -> Prepared:
        field = {"auto": None, "off": ""}.get(self.fixed_output, self.fixed_output)
        target = Target(name, url, self.api or WORKLOADS[self.workload[0]].API, self.model, self.api_key or None)
        bodies = _bodies(self.extra_body)
        return prepare(target, field, self.temperature, bodies.get("", {}) | bodies.get(name, {}), counter)

    def _varied(self, value: Any) -> dict[str, Any]:
        """The option of --vary as the workload takes it, if there is one."""
        if not self.vary:
            return {}
        name = _field(self.vary[0])
        try:
            return {name: getattr(type(self)(**{name: str(value)}), name)}
        except ValidationError as error:
            raise ValueError(f"--vary: {error.errors()[0]['msg']}") from None

    def cells(self) -> Iterator[Cell]:
        for (name, value), workload in self._workloads.items():
            varied = {_field(self.vary[0]): value} if self.vary else {}
            for load in self._loads(workload):
                for server in self._servers:
                    yield {"workload": name, **varied, **load, "server": server}

    def _loads(self, workload: Workload) -> list[Cell]:
        loads: list[Cell] = [{"rate": rate} for rate in self.rate]
        loads += [{"concurrency": number} for number in self.concurrency]
        return loads or ([{"arrivals": "as recorded"}] if workload.TIMED else [{"concurrency": _CONCURRENCY}])

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        """Run a load. Prompts depend on the repeat, the workload and the load; all servers get the same ones."""
        if self._interrupted:
            raise KeyboardInterrupt
        place = [value for name, value in cell.items() if name != "server"]
        plan = self._plan(cell, random.Random(f"{draw.random()} {place}").randrange(1 << 32))
        title = ", ".join(map(str, cell.values()))
        with tqdm(total=plan.bounds.requests, desc=title, unit="req", leave=False, disable=None) as bar:
            try:
                before = self._cpu(cell["server"])
                result = execute(self._servers[cell["server"]], plan, lambda record: bar.update())
                cpu = {"cpu": self._cpu(cell["server"]) - before} if self.process else {}
            except (ValueError, OSError) as error:
                raise BenchError(str(error)) from None
        self._interrupted = result.interrupted
        sent = self._sent.get(self._workload(cell), 0)
        self._sent[self._workload(cell)] = max(sent, plan.skip + result.facts["sessions"])
        is_finite = plan.workload.requests(1) is None and not plan.workload.TIMED
        result.facts["same_lines"] = is_finite and not self._is_bounded and sent > 0
        requests = {"requests": [record.as_dict() for record in result.records]} if self.records else {}
        return result.figures | cpu | {"facts": result.facts} | requests

    def _cpu(self, server: str) -> float:
        """CPU seconds of a server so far; 0 if its process was not given."""
        return cpu_seconds(self._pids[server]) if server in self._pids else 0.0

    def _workload(self, cell: Cell) -> tuple[str, Any]:
        return cell["workload"], cell[_field(self.vary[0])] if self.vary else ""

    @property
    def _is_bounded(self) -> bool:
        return self.requests is not None or self.duration is not None

    def _plan(self, cell: Cell, seed: int) -> Plan:
        workload = self._workloads[self._workload(cell)]
        arrivals: Arrivals = Recorded()
        if "rate" in cell:
            arrivals = Gamma(cell["rate"], self.burstiness)
        elif "concurrency" in cell:
            arrivals = Closed(cell["concurrency"])
        requests = self.requests
        if requests is None and self.duration is None:
            requests = workload.requests(cell.get("concurrency", 1))
        skip = 0
        if self._is_bounded and workload.requests(1) is None and not workload.TIMED:
            # All servers get the lines behind those of the loads before.
            skip = self._skipped.setdefault(seed, self._sent.get(self._workload(cell), 0))
        return Plan(
            workload=workload,
            arrivals=arrivals,
            bounds=Bounds(requests, self.duration, self.grace, self.max_outstanding),
            seed=seed,
            skip=skip,
            warms=self.warm_prefixes,
            warmup=self.warmup_requests,
            flush=self.flush,
            scripted=self.answers == "scripted",
            slo=Slo.parse(self.goodput) if self.goodput else None,
            timeouts=Timeouts(self.timeout, self.stall_timeout),
        )

    def details(self, results: Results) -> Iterator[RenderableType]:
        return details(results)

    def exit_code(self, results: Results) -> int:
        """130 if the user ended the run, 1 if a run had no complete answer."""
        if self._interrupted:
            return 130
        runs = [run for cell in results.cells.values() for run in results.of(cell).values()]
        return int(any(not run["completed"] for run in runs))


def _named(text: str) -> tuple[str, str]:
    """Name and URL of `NAME=URL` or `URL`."""
    name, equals, url = text.partition("=")
    return (name, url) if equals and "://" not in name else (text, text)


def _field(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _number(text: str) -> int | str:
    """A value of --vary; numbers become the x axis of plots."""
    return int(text) if text.isdigit() else text


def _bodies(texts: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Fields of requests by server; "" is every server. Raises ValueError."""
    found = {}
    for text in texts:
        name, body = ("", text) if text.lstrip().startswith("{") else text.split("=", 1) if "=" in text else ("", text)
        found[name] = json.loads(body)
        if not isinstance(found[name], dict):
            raise ValueError(f"{body} is no JSON object")
    return found


# With the options of all workloads.
Serve: type[ServeBench] = create_model(
    "Serve", __base__=ServeBench, __module__=__name__, __doc__=ServeBench.__doc__, **fields_of(*WORKLOADS)
)
