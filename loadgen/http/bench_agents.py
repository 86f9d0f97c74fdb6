"""`ramet bench agents`: what agents' habit of changing what they sent before costs in cached tokens."""

from __future__ import annotations

import argparse
import random
import secrets
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from loadgen.http.local_server import local_server
from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.prose import Prose
from loadgen.http.tables import make_table

Body = dict[str, Any]
# Requests of a session between two messages of its user.
_STEPS = 4
_MOST_STEPS = 64
_CONVERSATION = {"prompt_cache_breakpoint": {"mode": "explicit"}}


class Trace:
    """A session of a coding agent: a system prompt, tools, thoughts, and results that come back.

    Each request sends the whole conversation, and asks that it be kept up to its last message (a rolling breakpoint).
    """

    def __init__(self, seed: int, system_tokens: int, step_tokens: int):
        self._draw = random.Random(seed)
        prose = Prose(self._draw)
        self._system = prose.text(system_tokens)
        self._tools = [_tool(name, prose, system_tokens / 6) for name in ("read", "write", "run")]
        self._said = [tuple(prose.text(step_tokens * share) for share in (0.2, 0.3, 0.5)) for _ in range(_MOST_STEPS)]

    def request(self, step: int, habit: str) -> Body:
        """The body of request `step`, of an agent with one of `HABITS`."""
        line = f"x-billing: version=1.{step}; id={self._draw.getrandbits(40):010x};"
        system = f"{line}\n{self._system}" if habit == "billing line first" else self._system
        tools = self._tools
        if habit == "tools reordered":
            tools = self._draw.sample(tools, len(tools))
        if habit == "keys reordered":
            tools = [_shuffled(tool, self._draw) for tool in tools]
        turns = self._turns(step, stripped=habit == "thoughts stripped")
        if habit == "billing line last":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{line}"}
        turns[-1] = {**turns[-1], "content": [{"type": "text", "text": turns[-1]["content"], **_CONVERSATION}]}
        return {"messages": [{"role": "system", "content": system}, *turns], "tools": tools}

    def _turns(self, step: int, stripped: bool) -> list[Body]:
        """The messages of a user, and the steps since each of them; `stripped`: older steps have no thoughts."""
        turns: list[Body] = []
        for i in range(step + 1):
            asked, thought, result = self._said[i]
            if i % _STEPS == 0:
                turns.append({"role": "user", "content": asked})
            if i == step:
                break
            old = i // _STEPS < step // _STEPS
            shown = "I look." if stripped and old else f"<think>{thought}</think>I look."
            turns.append({"role": "assistant", "content": shown})
            turns.append({"role": "user", "content": f"<result>{result}</result>"})
        return turns


HABITS = (
    "none", "billing line first", "billing line last", "thoughts stripped", "tools reordered", "keys reordered"
)  # fmt: skip


def _tool(name: str, prose: Prose, tokens: float) -> Body:
    properties = {key: {"type": "string", "description": prose.text(tokens / 2)} for key in ("path", "text")}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    function = {"name": name, "description": prose.text(tokens), "parameters": schema}
    return {"type": "function", "function": function}


def _shuffled(value: Any, draw: random.Random) -> Any:
    """A JSON value with the keys of its objects in another order."""
    if not isinstance(value, dict):
        return value
    return {key: _shuffled(value[key], draw) for key in draw.sample(list(value), len(value))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server; default: a server is started for the benchmark")
    parser.add_argument(
        "--requests", type=int, choices=range(1, _MOST_STEPS), metavar="N", default=12, help="of a session; default: 12"
    )
    parser.add_argument("--system-tokens", type=int, default=400, help="of the system prompt; default: 400")
    parser.add_argument("--step-tokens", type=int, default=200, help="of a thought and a result; default: 200")
    parser.add_argument("--sessions", type=int, default=2, help="sessions of each habit; default: 2")
    add_files(parser, json="write every measurement", plot="plot the share of each prompt that was cached")
    parser.add_argument("server_options", nargs="*", help="after --: options for the server that is started")


def run(arguments: argparse.Namespace) -> int:
    """Replay the sessions and print the table."""
    server = nullcontext(arguments.url) if arguments.url else local_server(arguments.server_options)
    measured: dict[str, list[list[Body]]] = {habit: [] for habit in HABITS}
    with server as url, httpx.Client(base_url=url, timeout=600) as client:
        info = client.get("/server_info").raise_for_status().json()["model_info"]
        todo = [(habit, seed) for seed in range(arguments.sessions) for habit in HABITS]
        for habit, seed in track(todo, description="replaying"):
            trace = Trace(seed, arguments.system_tokens, arguments.step_tokens)
            measured[habit].append(_replay(client, trace, habit, arguments.requests))
    _report(measured, info)
    data = {"arguments": vars(arguments), "model": info, "sessions": measured}
    write_files(arguments, data, plot=partial(_plot, measured))
    return 0


def _replay(client: httpx.Client, trace: Trace, habit: str, requests: int) -> list[Body]:
    """Token counts of each request of a session, which shares its cache with no other."""
    salt, counts, earlier = secrets.token_hex(8), list[Body](), list[list[int]]()
    for step in range(requests):
        options = {"cache_salt": salt, "prompt_cache_options": {"mode": "explicit"}, "return_token_ids": True}
        body = {**trace.request(step, habit), **options, "max_tokens": 1, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        prompt, details = answer["prompt_token_ids"], answer["usage"]["prompt_tokens_details"]
        exact = min(max((_common(prompt, other) for other in earlier), default=0), len(prompt) - 1)
        earlier.append(prompt)
        read, kept = details["cached_tokens"], details["cache_write_tokens"]
        counts.append({"prompt": len(prompt), "exact": exact, "read": read, "kept": kept})
    return counts


def _common(one: list[int], other: list[int]) -> int:
    """Leading tokens that two prompts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def _total(counts: list[Body], name: str) -> int:
    return sum(count[name] for count in counts)


def _report(measured: dict[str, list[list[Body]]], info: Body) -> None:
    columns = ("habit", "prompts", "longest prefix", "read", "hits", "prefilled", "times none")
    table = make_table(f"agents' habits, {info['name']}", columns)
    spent = {habit: [_total(one, "prompt") - _total(one, "read") for one in found] for habit, found in measured.items()}
    for habit, found in measured.items():
        prompt, exact, read = (sum(_total(one, name) for one in found) for name in ("prompt", "exact", "read"))
        times = f"{sum(spent[habit]) / sum(spent['none']):.2f}"
        figures = (f"{prompt:,}", f"{exact:,}", f"{read:,}", f"{read / prompt:.1%}")
        table.add_row(habit, *figures, f"{prompt - read:,}", times)
    Console().print(table)


def _plot(measured: dict[str, list[list[Body]]], path: Path) -> None:
    with drawing(path, (7.4, 3.8)) as axes:
        for habit, (first, *_) in measured.items():
            axes.plot(
                range(1, len(first) + 1),
                [count["read"] / count["prompt"] for count in first],
                "o-",
                label=habit,
                alpha=0.7,
            )
        axes.set(xlabel="request of the session", ylabel="share of the prompt that was cached", ylim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
