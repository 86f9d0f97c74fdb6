"""`ramet bench prefix`: time to first token of a long shared prefix and a short question, cold and warm."""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from contextlib import nullcontext
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from loadgen.http.local_server import local_server
from loadgen.http.outputs import add_files, write_files
from loadgen.http.tables import make_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server; default: a server is started for the benchmark")
    parser.add_argument("--prefix-tokens", type=int, default=4096, help="default: 4096")
    parser.add_argument("--question-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--runs", type=int, default=7, help="repetitions, each with a new prefix; default: 7")
    add_files(parser, json="write every measurement")
    parser.add_argument("server_options", nargs="*", help="after --: options for the server that is started")


def run(arguments: argparse.Namespace) -> int:
    server = nullcontext(arguments.url) if arguments.url else local_server(arguments.server_options)
    with server as url, httpx.Client(base_url=url, timeout=600) as client:
        info = client.get("/server_info").raise_for_status().json()["model_info"]
        measured = _measure(client, info["vocab_size"], arguments)
    _report(measured, info, arguments)
    return 0


def _measure(client: httpx.Client, vocab: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds by kind. Every prefix is new, so that cold is cold; the first round is a warm-up."""
    times: dict[str, list[float]] = {"cold": [], "warm": [], "question alone": []}
    draw = random.SystemRandom()

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab // 8, vocab) for _ in range(count)]

    for i in track(range(arguments.runs + 1), description="measuring"):
        prefix = ids(arguments.prefix_tokens)
        prompts = {
            "cold": prefix + ids(arguments.question_tokens),
            "warm": prefix + ids(arguments.question_tokens),
            "question alone": ids(arguments.question_tokens),
        }
        for kind, prompt in prompts.items():
            seconds, cached = _first_token(client, prompt)
            expected = arguments.prefix_tokens if kind == "warm" else 0
            if abs(cached - expected) > 16:
                raise RuntimeError(f"{kind}: {cached} tokens came from the cache, not about {expected}")
            if i:
                times[kind].append(seconds)
    return times


def _first_token(client: httpx.Client, prompt: list[int]) -> tuple[float, int]:
    body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    start = time.perf_counter()
    with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return time.perf_counter() - start, event["meta_info"]["cached_tokens"]
    raise RuntimeError("the stream ended without a token")


def _report(times: dict[str, list[float]], info: dict[str, Any], arguments: argparse.Namespace) -> None:
    question, prefix = arguments.question_tokens, arguments.prefix_tokens
    cold, ideal = statistics.median(times["cold"]), question / (prefix + question)
    title = f"time to first token, {prefix} + {question} tokens, {info['name']} in {info['dtype']}"
    table = make_table(title, ("", "median ms", "min", "max", "of cold", "over ideal share"))
    for kind, values in times.items():
        share = statistics.median(values) / cold
        ratio = f"{share / ideal:.2f}" if kind == "warm" else ""
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(kind, *(f"{1000 * value:.0f}" for value in figures), f"{share:.2%}", ratio)
    table.add_row("ideal share of cold", f"{1000 * cold * ideal:.0f}", "", "", f"{ideal:.2%}", "1.00")
    machine = f"{platform.machine()}, {platform.system()}, {info['device']}, {info['attention_backend']} attention"
    Console().print(table, f"{arguments.runs} runs after one warm-up, each with a fresh prefix; {machine}")
    write_files(arguments, {"arguments": vars(arguments), "model": info, "seconds": times})
