"""`ramet bench failover`: hits and answers over time, while a server dies, one joins, and KV events are lost.

Requests come at a steady rate. Prompts come several times, and the first answer says what the others must be.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from loadgen.fleet.fronts import RayCluster
from loadgen.fleet.proxy import Placed, running_proxy
from loadgen.fleet.replicas import (
    Replica,
    engine_options,
    loaded_tokens,
    make_model,
    running_replicas,
    start_replicas,
)
from loadgen.http import options
from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.prose import Prose
from loadgen.http.relay import Relay
from loadgen.http.tables import make_table, wide_console
from runtime.config import default_cache_dir
from runtime.models.default_model import fetch_default

# Prefixes that are asked for at a time; one in so many requests brings a new one, in place of the oldest.
_GROUPS, _RENEWED, _PREFIX_WORDS, _QUESTIONS, _NEW = 24, 12, 350, 4, 8
# Seconds that a request may take before it counts as stuck, and of a window of the plot.
_STUCK_S, _WINDOW_S = 60.0, 4.0

# What happens at the beginning of each phase, by name.
Acts = tuple[tuple[str, Callable[[], None]], ...]


@dataclass
class Life:
    """The requests of a run, each with its time, its prompt and cached tokens, and its end in a word."""

    rows: list[tuple[float, int, int, str]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)

    def ends(self) -> dict[str, int]:
        """Number of requests by their end."""
        words = [row[3] for row in self.rows]
        return {word: words.count(word) for word in sorted(set(words))}

    def hits(self, begin_s: float, end_s: float) -> float:
        """Cached share of the prompt tokens that were sent in between."""
        within = [row for row in self.rows if begin_s <= row[0] < end_s]
        return sum(row[2] for row in within) / max(sum(row[1] for row in within), 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=options.count, default=3)
    parser.add_argument("--pool-tokens", type=options.count, default=6144, help="of each server; default: 6144")
    parser.add_argument("--rate", type=options.positive, default=6, help="requests per second; default: 6")
    parser.add_argument("--phase", type=options.positive, default=20, help="seconds between two events; default: 20")
    parser.add_argument("--kv-store", metavar="URL", help="that all servers share")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter that has Ray, whose Serve is the front then")
    add_files(parser, "json", "plot")


def run(arguments: argparse.Namespace) -> int:
    """Run all phases; 0 if no answer was wrong, none was lost and no request stuck."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        tokenizer = fetch_default(default_cache_dir())
        shared = ("--kv-store", arguments.kv_store) if arguments.kv_store else ()
        settings = engine_options(make_model(Path(directory), tokenizer), arguments.pool_tokens, shared)
        life, replicas = Life(), list[Replica]()
        acts: Acts
        if arguments.ray:
            ray = stack.enter_context(RayCluster(arguments.ray, arguments.replicas, settings))
            url, acts = ray.url, (("a replica is killed", ray.kill), ("one more is asked for", ray.grow))
        else:
            replicas = stack.enter_context(running_replicas(arguments.replicas, settings))
            url, acts = _behind_proxy(stack, replicas, settings, tokenizer)
        asyncio.run(_live(life, url, (("warm", lambda: None), *acts), arguments))
        loaded = [loaded_tokens(one.url) for one in replicas if one.process.poll() is None]
    _print(life, arguments.phase)
    if loaded:
        wide_console().print(f"from tiers: {sum(loaded)} tokens, {loaded[-1]} of them to the server that joined")
    data = {"requests": life.rows, "marks": life.marks, "ends": life.ends(), "answers": len({*life.answers.values()})}
    data["loaded_tokens"] = loaded
    write_files(arguments, data, plot=partial(_plot, life))
    return int(life.ends().keys() != {"right"})


def _behind_proxy(
    stack: ExitStack, replicas: list[Replica], settings: Sequence[str], tokenizer: Path
) -> tuple[str, Acts]:
    last = len(replicas) - 1
    relay = stack.enter_context(Relay(int(replicas[0].events.rpartition(":")[2])))
    deaf = Replica(replicas[0].process, replicas[0].url, f"tcp://127.0.0.1:{relay.port}", replicas[0].replay)
    proxy = stack.enter_context(running_proxy(lambda: Placed(0), tokenizer, [deaf, *replicas[1:]]))

    def kill() -> None:
        replicas[last].kill()
        proxy.leave(last)

    def add() -> None:
        (new,) = start_replicas(1, settings)
        replicas.append(new)
        proxy.join(new)

    return proxy.url, (
        ("a server is killed", kill),
        ("another one joins", add),
        ("events are lost", relay.cut),
        ("events come again", relay.mend),
    )


async def _live(life: Life, url: str, phases: Acts, arguments: argparse.Namespace) -> None:
    begun_s = time.monotonic()
    connector = TCPConnector(limit=0, force_close=True)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=_STUCK_S)) as http:
        load = asyncio.create_task(_load(life, http, url, arguments.rate, begun_s))
        for name, act in phases:
            life.marks.append((time.monotonic() - begun_s, name))
            await asyncio.to_thread(act)
            await asyncio.sleep(arguments.phase)
        life.marks.append((time.monotonic() - begun_s, "end"))
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


async def _load(life: Life, http: ClientSession, url: str, rate: float, begun_s: float) -> None:
    draw, prose = random.Random(0), Prose(random.Random(1))
    prefixes = deque((prose.text(_PREFIX_WORDS) for _ in range(_GROUPS)), maxlen=_GROUPS)
    questions = [prose.text(20) for _ in range(_QUESTIONS)]
    async with asyncio.TaskGroup() as group:
        try:
            while True:
                if not draw.randrange(_RENEWED):
                    prefixes.append(prose.text(_PREFIX_WORDS))
                prompt = f"{draw.choice(prefixes)} {draw.choice(questions)}"
                group.create_task(_ask(life, http, url, prompt, begun_s))
                await asyncio.sleep(draw.expovariate(rate))
        except asyncio.CancelledError:
            """No new ones; those under way end within the group."""


async def _ask(life: Life, http: ClientSession, url: str, prompt: str, begun_s: float) -> None:
    sent_s = time.monotonic() - begun_s
    body = {"model": "model", "prompt": prompt, "max_tokens": _NEW, "temperature": 0, "ignore_eos": True}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            got: dict[str, Any] = await answer.json(content_type=None)
            if answer.status != 200:
                life.rows.append((sent_s, 0, 0, f"status {answer.status}"))
                return
    except TimeoutError:
        life.rows.append((sent_s, 0, 0, "stuck"))
    except (ClientError, ValueError):
        life.rows.append((sent_s, 0, 0, "lost"))
    else:
        text, usage = got["choices"][0]["text"], got["usage"]
        word = "right" if life.answers.setdefault(prompt, text) == text else "wrong"
        life.rows.append((sent_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], word))


def _print(life: Life, phase_s: float) -> None:
    table = make_table("hits, %", ("phase", "first quarter", "last half"))
    for (begin_s, name), (end_s, _) in zip(life.marks, life.marks[1:], strict=False):
        acted_s = end_s - phase_s  # a server takes its time to start
        early, late = life.hits(acted_s, acted_s + phase_s / 4), life.hits(end_s - phase_s / 2, end_s)
        table.add_row(f"{name} (at {begin_s:.0f} s)", f"{100 * early:.1f}", f"{100 * late:.1f}")
    console = wide_console()
    console.print(table)
    ends = ", ".join(f"{number} {word}" for word, number in life.ends().items())
    console.print(f"{ends}; {len(set(life.answers.values()))} different answers to {len(life.answers)} prompts")


def _plot(life: Life, path: Path) -> None:
    with drawing(path, (9, 3.2)) as axes:
        edges = np.arange(0, life.marks[-1][0], _WINDOW_S)
        axes.plot(edges + _WINDOW_S / 2, [100 * life.hits(at, at + _WINDOW_S) for at in edges], "o-", markersize=3)
        for at, name in life.marks[1:-1]:
            axes.axvline(at, color="k", linestyle=":")
            axes.text(at, 2, f" {name}", rotation=90, fontsize=7)
        axes.set(xlabel="s", ylabel=f"cached prompt tokens, % in {_WINDOW_S:g} s", ylim=(0, 100))
        axes.grid(alpha=0.3)
