"""`ramet bench drafted`: output tokens per second of several servers, on texts that drafts can foresee.

The tasks are those of `ramet bench drafts`. Every server gets the same requests over OpenAI's completions, in turn,
behind prompts that it has cached; vLLM's `structured_outputs` hold the model to an answer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from rich.progress import track

from loadgen.http.outputs import write_files
from loadgen.http.prose import Prose
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.http.target import Target, TargetError, find_model
from loadgen.micro.bench_drafts import HEAT, TASKS, Question, add_task_arguments, literal, ratios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", nargs="+", required=True, metavar="NAME=URL", help="ratios are to the last one")
    add_task_arguments(parser, questions=2)


def run(arguments: argparse.Namespace) -> int:
    a, found = arguments, []
    targets = [Target(name, url, "completions") for name, _, url in (pair.partition("=") for pair in a.url)]
    draw = random.Random(a.seed)
    prose = Prose(draw)
    try:
        models = {target.name: find_model(target) for target in targets}
        cells = [(task, clients) for task in a.tasks for clients in a.clients]
        for task, clients in track(cells, description="servers"):
            found.append(_measure(targets, models, draw, prose, task, clients, a))
            write_files(a, {"cells": found})
    except (TargetError, httpx.HTTPError) as error:
        print(f"error: {error}")
        return 1
    columns = ("task", "clients", *(f"{target.name}, tokens/s" for target in targets),
               *(f"{target.name} / {targets[-1].name} [95 %]" for target in targets[:-1]))  # fmt: skip
    rows = [_row(cell, [target.name for target in targets]) for cell in found]
    wide_console().print(make_table("drafts on several servers", columns, rows, left=1))
    write_files(a, {"cells": found}, markdown_table(columns, rows))
    return 0


def _measure(
    targets: Sequence[Target],
    models: dict[str, str],
    draw: random.Random,
    prose: Prose,
    task: str,
    clients: int,
    a: argparse.Namespace,
) -> dict[str, Any]:
    cell: dict[str, Any] = {"task": task, "clients": clients, **{target.name: [] for target in targets}}
    for number in range(a.rounds + 1):
        asked = [TASKS[task](draw, prose) for _ in range(clients * a.questions)]
        seed = draw.randrange(1 << 30)
        for target in targets[:: -1 if number % 2 else 1]:
            bodies = [
                _body(models[target.name], question, HEAT.get(task, 0.0), seed + i, a.output)
                for i, question in enumerate(asked)
            ]
            rate = _rate(target, bodies, clients, asked[0].again)
            if number:  # the first round warms up
                cell[target.name].append(rate)
    return cell


def _body(model: str, question: Question, heat: float, seed: int, most: int) -> dict[str, Any]:
    body = {"model": model, "prompt": question.prompt, "temperature": heat, "seed": seed, "max_tokens": most}
    if question.answer is None:
        return {**body, "ignore_eos": True}
    # A character is one token at most, but for rare ones.
    return {**body, "max_tokens": len(question.answer) + 8, "structured_outputs": {"regex": literal(question.answer)}}


def _rate(target: Target, bodies: Sequence[dict[str, Any]], clients: int, again: bool) -> float:
    """Output tokens per second."""
    with target.client() as client, ThreadPoolExecutor(clients) as pool:

        def ask(body: dict[str, Any]) -> int:
            answer = client.post("/v1/completions", json=body)
            if answer.is_error:
                raise TargetError(f"{target.name}: {answer.status_code} {answer.text[:300]}")
            return int(answer.json()["usage"]["completion_tokens"])

        list(pool.map(ask, bodies if again else [{**body, "max_tokens": 1} for body in bodies]))
        started = time.perf_counter()
        return sum(pool.map(ask, bodies)) / (time.perf_counter() - started)


def _row(cell: dict[str, Any], names: Sequence[str]) -> list[str]:
    medians = (f"{statistics.median(cell[name]):.0f}" for name in names)
    return [cell["task"], str(cell["clients"]), *medians, *(ratios(cell, name, names[-1])[1] for name in names[:-1])]
