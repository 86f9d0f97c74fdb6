"""Options of the command line that several benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

from loadgen.http.apis import APIS
from loadgen.http.arrivals import Arrivals, Closed, Constant, Gamma, Open, Ramp, Recorded
from loadgen.http.client import Timeouts
from loadgen.http.lengths import Distribution
from loadgen.http.load import Bounds
from loadgen.http.run import Plan, Prepared, prepare
from loadgen.http.slo import LATENCIES, Slo
from loadgen.http.target import FIXED_OUTPUT, Target
from loadgen.http.tokens import TokenCounter
from loadgen.http.workloads import WORKLOADS, Workload

KEY_VARIABLE = "RAMET_BENCH_API_KEY"
_DEFAULT_CONCURRENCY = 8


def reading(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose ValueError becomes the message."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _number(kind: type, least: float, above: bool = False) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not (value > least if above else value >= least) or value == float("inf"):
            raise ValueError(f"must be {'above' if above else 'at least'} {least:g}")
        return value

    return reading(parse)


count = _number(int, 1)
whole = _number(int, 0)
positive = _number(float, 0, above=True)
seconds = _number(float, 0)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options of a server and of the requests to it."""
    group = parser.add_argument_group("server")
    group.add_argument("--api", choices=list(APIS), help="default: chat for the workload file, else completions")
    group.add_argument("--model", help="default: the first that /v1/models names")
    group.add_argument(
        "--api-key", default=os.environ.get(KEY_VARIABLE), help=f"a bearer token; default: ${KEY_VARIABLE}"
    )
    group.add_argument("--temperature", type=seconds, default=0.0, help="default: 0, greedy")
    group.add_argument(
        "--fixed-output",
        choices=["auto", *FIXED_OUTPUT, "off"],
        default="auto",
        help="the field for answers of a fixed length; default: the first of them that the server accepts",
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the model's tokenizer.json or its directory, to count tokens where the server does not",
    )
    group.add_argument(
        "--extra-body", type=reading(json_object), default={}, metavar="JSON", help="further fields of every request"
    )
    group.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request; default: 600")
    group.add_argument(
        "--stall-timeout", type=positive, default=300.0, metavar="S", help="without a byte; default: 300"
    )


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def target(arguments: argparse.Namespace, name: str, url: str) -> Target:
    """The server of the options."""
    api = arguments.api or WORKLOADS[getattr(arguments, "workload", "shared-prefix")].API
    return Target(name, url, api, arguments.model, arguments.api_key or None)


def prepared(arguments: argparse.Namespace, server: Target, extra: dict[str, Any] | None = None) -> Prepared:
    """The server with its model, limits and token costs; `extra`: fields of its requests beside `--extra-body`.

    Raises TargetError, and ValueError for a tokenizer that cannot be read.
    """
    field = {"auto": None, "off": ""}.get(arguments.fixed_output, arguments.fixed_output)
    counter = None if arguments.tokenizer is None else TokenCounter(arguments.tokenizer)
    return prepare(server, field, arguments.temperature, arguments.extra_body | (extra or {}), counter)


def timeouts(arguments: argparse.Namespace) -> Timeouts:
    """The timeouts of a request."""
    return Timeouts(arguments.timeout, arguments.stall_timeout)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add `--workload`, and an option for every field of every workload."""
    group = parser.add_argument_group(
        "workload",
        "Lengths in tokens and times in seconds are N, uniform:LOW:HIGH, normal:MEAN:SD[:LOW:HIGH] or "
        "lognormal:MEAN:SD[:LOW:HIGH].",
    )
    group.add_argument("--workload", choices=list(WORKLOADS), default="shared-prefix", help="default: shared-prefix")
    for name, uses in _workload_options().items():
        kind = uses[next(iter(uses))][0]
        defaults = ", ".join(
            f"{workload} {default}" for workload, (_, default) in uses.items() if default is not MISSING
        )
        if kind is bool:
            group.add_argument(_flag(name), action="store_true", default=None, help=f"for {', '.join(uses)}")
        else:
            text = f"defaults: {defaults}" if defaults else f"for {', '.join(uses)}"
            group.add_argument(_flag(name), type=_TYPES[kind], metavar=_METAVARS[kind], help=text)
    group.add_argument("--seed", type=whole, help="of texts, lengths and arrivals; default: another one every time")
    group.add_argument(
        "--answers",
        choices=["server", "scripted"],
        default="server",
        help="the answers on which later turns build; default: the server's own",
    )


_TYPES: dict[type, Callable[[str], Any]] = {
    Distribution: reading(Distribution.parse),
    int: whole,
    float: seconds,
    Path: Path,
}
_METAVARS: dict[type, str] = {Distribution: "DIST", int: "N", float: "X", Path: "FILE"}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _workload_options() -> dict[str, dict[str, tuple[type, Any]]]:
    """Option -> workload -> (type, default)."""
    options: dict[str, dict[str, tuple[type, Any]]] = {}
    for workload, kind in WORKLOADS.items():
        hints = get_type_hints(kind)
        for field in fields(kind):  # type: ignore[arg-type]
            options.setdefault(field.name, {})[workload] = (hints[field.name], field.default)
    return options


def workload(arguments: argparse.Namespace) -> Workload:
    """The chosen workload. Raises ValueError for an option that it lacks, and for a missing one that it needs."""
    kind = WORKLOADS[arguments.workload]
    given = {name: value for name in _workload_options() if (value := getattr(arguments, name)) is not None}
    own = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if foreign := given.keys() - own.keys():
        raise ValueError(f"{', '.join(map(_flag, sorted(foreign)))}: the workload {arguments.workload} has none")
    if missing := [name for name, field in own.items() if field.default is MISSING and name not in given]:
        raise ValueError(f"the workload {arguments.workload} needs {', '.join(map(_flag, missing))}")
    return kind(**given)


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    """Add the options of the arrival process."""
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--arrivals",
        choices=["closed", "poisson", "gamma", "constant", "ramp", "trace"],
        help="default: poisson with --rate, trace for a workload with times, else closed",
    )
    group.add_argument("--concurrency", type=count, metavar="N", help=f"closed; default: {_DEFAULT_CONCURRENCY}")
    group.add_argument("--rate", type=positive, metavar="X", help="sessions per second, of open arrivals")
    group.add_argument("--burstiness", type=positive, metavar="X", help="gamma: below 1 is burstier than Poisson")
    group.add_argument("--ramp-to", type=positive, metavar="X", help="ramp: the rate at its end")
    group.add_argument("--ramp-seconds", type=positive, metavar="S", help="ramp: how long the rate grows")


def arrivals(arguments: argparse.Namespace, work: Workload) -> Arrivals:
    """The chosen arrival process. Raises ValueError for options that do not go together."""
    kind = arguments.arrivals or (
        "poisson" if arguments.rate else "closed" if arguments.concurrency or not work.TIMED else "trace"
    )
    needs = {
        "closed": (),
        "trace": (),
        "poisson": ("rate",),
        "gamma": ("rate", "burstiness"),
        "constant": ("rate",),
        "ramp": ("rate", "ramp_to", "ramp_seconds"),
    }[kind]
    given = {
        name for name in ("concurrency", "rate", "burstiness", "ramp_to", "ramp_seconds") if getattr(arguments, name)
    }
    takes = {"concurrency"} if kind == "closed" else set(needs)
    if given != takes and not (kind == "closed" and not given):
        wanted = " and ".join(map(_flag, needs)) or ("--concurrency" if kind == "closed" else "no further option")
        raise ValueError(f"{kind} arrivals take {wanted}, not {', '.join(map(_flag, sorted(given))) or 'nothing'}")
    if kind == "trace":
        if not work.TIMED:
            raise ValueError("trace arrivals need a workload with times, such as trace")
        return Recorded()
    if kind == "closed":
        return Closed(arguments.concurrency or _DEFAULT_CONCURRENCY)
    return _open(kind, arguments)


def _open(kind: str, arguments: argparse.Namespace) -> Open:
    if kind == "constant":
        return Constant(arguments.rate)
    if kind == "ramp":
        return Ramp(arguments.rate, arguments.ramp_to, arguments.ramp_seconds)
    return Gamma(arguments.rate, arguments.burstiness or 1.0)


def add_bounds(parser: argparse.ArgumentParser) -> None:
    """Add the options of the end of a run, and of what is counted."""
    group = parser.add_argument_group("bounds")
    group.add_argument(
        "--requests", type=count, metavar="N", help="default: one round of the workload, unless --duration is given"
    )
    group.add_argument("--duration", type=positive, metavar="S", help="no request is sent after it")
    group.add_argument(
        "--grace",
        type=seconds,
        default=30.0,
        metavar="S",
        help="time for running requests after --duration; default: 30",
    )
    group.add_argument(
        "--max-outstanding", type=count, default=1024, metavar="N", help="most requests running at once; default: 1024"
    )
    group.add_argument(
        "--warmup", type=whole, default=0, metavar="N", help="uncounted requests of other text first; default: 0"
    )
    group.add_argument("--flush", action="store_true", help="empty the server's cache after the warm-up")
    group.add_argument(
        "--cut", type=seconds, default=0.0, metavar="S", help="uncounted seconds at the start; default: 0"
    )
    group.add_argument("--goodput", nargs="+", default=[], metavar="SLO", help=f"LATENCY:MS, of {', '.join(LATENCIES)}")


def bounds(arguments: argparse.Namespace, work: Workload) -> Bounds:
    """The bounds; one round of the workload where none is given."""
    requests = arguments.requests
    if requests is None and arguments.duration is None:
        requests = work.requests
    return Bounds(requests, arguments.duration, arguments.grace, arguments.max_outstanding)


def slo(arguments: argparse.Namespace) -> Slo | None:
    """The service levels. Raises ValueError."""
    return Slo.parse(arguments.goodput) if arguments.goodput else None


def plan(arguments: argparse.Namespace, work: Workload, comes: Arrivals, number: int) -> Plan:
    """A run with the arrivals `comes` and the seed `number`, the rest from the options. Raises ValueError."""
    return Plan(
        workload=work,
        arrivals=comes,
        bounds=bounds(arguments, work),
        seed=number,
        warmup=arguments.warmup,
        flush=arguments.flush,
        cut_s=arguments.cut,
        scripted=arguments.answers == "scripted",
        slo=slo(arguments),
        timeouts=timeouts(arguments),
    )


def need_matplotlib() -> None:
    """Raise ValueError where matplotlib is missing: before a run, not after it."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'ramet[bench]'")


def seed(arguments: argparse.Namespace) -> int:
    """The seed; a random one where none is given, so that no run hits what an earlier one left in the cache."""
    return secrets.randbits(32) if arguments.seed is None else arguments.seed
