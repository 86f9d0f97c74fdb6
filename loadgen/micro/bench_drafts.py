"""`ramet bench drafts`: output tokens per second with drafts and without, in process.

One engine does both, each in a namespace of its own: two would differ in where their weights lie in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track

from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.prose import Prose
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.micro.intervals import centred, shown
from radix import Namespace
from runtime.engine.offline import Engine, make_submissions

_COLUMNS = (
    "task",
    "clients",
    "off, tokens/s",
    "auto, tokens/s",
    "auto / off [95 %]",
    "tokens per CPU second, auto / off [95 %]",
    "right of drafted",
    "drafted of output",
)
_NAMES = ("price", "total", "count", "order", "stock", "weight", "height", "score", "limit", "offset", "budget", "rate")


class Question(NamedTuple):
    """A prompt, and the answer to which a grammar holds the model; None: it answers as it likes."""

    prompt: str
    answer: str | None = None
    again: bool = False


def _chat(system: str, user: str) -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def quote(draw: random.Random, prose: Prose) -> Question:
    """An answer that repeats a paragraph of a document, with a sentence of its own before and behind."""
    paragraphs = [prose.text(70) for _ in range(5)]
    answer = f"{prose.text(12)} {draw.choice(paragraphs)} {prose.text(12)}"
    return Question(_chat("Answer from the document.", "\n\n".join(paragraphs) + "\n\nWhat does it say?"), answer)


def edit(draw: random.Random, prose: Prose) -> Question:
    """A function that comes back with one name changed."""
    names = draw.sample(_NAMES, 4)
    lines = [f"def {names[0]}_of({names[1]}, {names[2]}):", f"    {names[3]} = {draw.randrange(100)}"]
    for _ in range(10):
        a, b, c = draw.choices(names[1:], k=3)
        lines.append(f"    {a} = {b} {draw.choice('+-*')} {c} {draw.choice('+-')} {draw.randrange(1000)}")
    code = "\n".join([*lines, f"    return {names[3]}"])
    new = draw.choice([name for name in _NAMES if name not in names])
    return Question(_chat("Edit code.", f"Rename {names[2]} to {new}:\n{code}"), code.replace(names[2], new))


def call(draw: random.Random, prose: Prose) -> Question:
    """An agent's next call of a tool, after some calls in the same form."""

    def one() -> str:
        path = f"src/{draw.choice(_NAMES)}/{draw.choice(_NAMES)}.py"
        arguments = {"path": path, "first_line": draw.randrange(400), "last_line": draw.randrange(400, 900)}
        return json.dumps({"name": "read_file", "arguments": arguments})

    calls = [one() for _ in range(6)]
    turns = "".join(f"{text}\n{prose.text(25)}\n" for text in calls)
    return Question(_chat("Call tools.", turns + "Go on."), "\n".join([draw.choice(calls), one(), one()]))


def chat(draw: random.Random, prose: Prose) -> Question:
    """A third turn, answered as the model likes."""
    turns = "".join(
        f"<|im_start|>user\n{prose.text(20)}<|im_end|>\n<|im_start|>assistant\n{prose.text(60)}<|im_end|>\n"
        for _ in range(2)
    )
    return Question(
        turns + f"<|im_start|>user\nWhat can you tell me about {prose.text(3)}<|im_end|>\n<|im_start|>assistant\n"
    )


def again(draw: random.Random, prose: Prose) -> Question:
    """An answer that was given before."""
    return chat(draw, prose)._replace(again=True)


def unique(draw: random.Random, prose: Prose) -> Question:
    """Text that repeats nothing: at a temperature of 1.5, the model writes what stands nowhere."""
    return Question(_chat("Write.", prose.text(40)))


TASKS: dict[str, Callable[[random.Random, Prose], Question]] = {
    "quote": quote, "edit": edit, "call": call, "chat": chat, "again": again, "unique": unique,
}  # fmt: skip
HEAT = {"unique": 1.5, "chat": 0.7, "again": 0.7}


def add_task_arguments(parser: argparse.ArgumentParser, questions: int) -> None:
    """Add the options of the tasks and their table; `questions`: of each client by default."""
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="default: 1 8 32")
    parser.add_argument("--output", type=int, default=128, help="output tokens where the model answers freely")
    parser.add_argument(
        "--questions",
        type=int,
        default=questions,
        help=f"that each client asks one after the other, in a round (default: {questions})",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each median (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    add_files(parser, "markdown", json="write the figures of every round, after each cell")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m-instruct", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    add_task_arguments(parser, questions=4)
    add_files(parser, "plot")


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    draw, found = random.Random(a.seed), []
    prose = Prose(draw)
    with Engine(a.model, dtype=a.dtype, drafts="auto") as engine:
        cells = [(task, clients) for task in a.tasks for clients in a.clients]
        for task, clients in track(cells, description="drafts"):
            found.append(measure(engine, draw, prose, task, clients, a))
            write_files(a, {"cells": found})
    rows = [_row(cell) for cell in found]
    wide_console().print(make_table(f"drafts, {engine.info.dtype}", _COLUMNS, rows, left=1))
    write_files(a, {"cells": found}, markdown_table(_COLUMNS, rows), partial(_plot, found))
    return 0


def measure(
    engine: Engine, draw: random.Random, prose: Prose, task: str, clients: int, a: argparse.Namespace
) -> dict[str, Any]:
    """Rates of each round with the engine's drafter and without, in turns, and what it drafted."""
    ways = {"off": None, "auto": engine.core.drafter}
    cell: dict[str, Any] = {"task": task, "clients": clients, "drafted": 0, "accepted": 0, "output": 0}
    cell |= {name: [] for name in (*ways, *(f"{name} by CPU" for name in ways))}
    for number in range(a.rounds + 1):
        asked = [TASKS[task](draw, prose) for _ in range(clients * a.questions)]
        seed = draw.randrange(1 << 30)
        for name in sorted(ways, reverse=bool(number % 2)):
            engine.core.drafter = ways[name]
            rate, by_cpu, outputs = _run(engine, name, asked, clients, HEAT.get(task, 0.0), seed, a.output)
            if not number:
                continue  # warms up
            cell[name].append(rate)
            cell[f"{name} by CPU"].append(by_cpu)
            if name == "auto":
                cell["output"] += sum(output.completion_tokens for output in outputs)
                cell["drafted"] += sum(output.drafted for output in outputs)
                cell["accepted"] += sum(output.accepted for output in outputs)
    engine.core.drafter = ways["auto"]
    return cell


def _run(
    engine: Engine, way: str, asked: Sequence[Question], clients: int, heat: float, seed: int, most: int
) -> tuple[float, float, list[Any]]:
    """Output tokens per second, and per CPU second of the process, of clients behind cached prompts.

    They ask one question after the other.
    """
    sampling = [_sampling(question, heat, seed + i, most) for i, question in enumerate(asked)]
    first = sampling if asked[0].again else [{"max_new_tokens": 1, "temperature": 0}] * len(asked)
    _ask(engine, way, asked, first, clients)
    started, cpu = time.perf_counter(), time.process_time()
    outputs = _ask(engine, way, asked, sampling, clients)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = sum(output.completion_tokens for output in outputs)
    return tokens / seconds, tokens / cpu, outputs


def _ask(
    engine: Engine, way: str, asked: Sequence[Question], sampling: Sequence[dict[str, Any]], clients: int
) -> list[Any]:
    questions = iter(zip(asked, sampling, strict=True))

    async def client() -> list[Any]:
        # Whoever is done takes the next question, so that all are busy until none is left.
        return [await answer(question.prompt, how) for question, how in questions]

    async def answer(prompt: str, how: dict[str, Any]) -> Any:
        async for output in engine.astream_all(make_submissions(prompt, how, None, Namespace(salt=way))):
            last = output
        return last

    async def every() -> list[list[Any]]:
        return await asyncio.gather(*(client() for _ in range(clients)))

    return [output for outputs in asyncio.run(every()) for output in outputs]


def _sampling(question: Question, heat: float, seed: int, most: int) -> dict[str, Any]:
    if question.answer is not None:
        return {"temperature": heat, "regex": literal(question.answer)}
    return {"temperature": heat, "seed": seed, "max_new_tokens": most, "ignore_eos": True}


def literal(text: str) -> str:
    """A regular expression that one text alone matches."""
    return "".join("\\" + c if c in r"\.+*?()|[]{}^$#&-~/" else "\\n" if c == "\n" else c for c in text)


def ratios(cell: dict[str, Any], name: str, base: str) -> tuple[np.ndarray, str]:
    """Of one way of a cell to another, by rounds, and their median with its interval."""
    found = np.array(cell[name]) / np.array(cell[base])
    return found, shown(found, ".2f", np.median)


def _row(cell: dict[str, Any]) -> list[str]:
    return [
        *(cell["task"], str(cell["clients"])),
        *(f"{statistics.median(cell[name]):.0f}" for name in ("off", "auto")),
        ratios(cell, "auto", "off")[1],
        ratios(cell, "auto by CPU", "off by CPU")[1],
        f"{cell['accepted'] / cell['drafted']:.0%}" if cell["drafted"] else "-",
        f"{cell['drafted'] / cell['output']:.0%}",
    ]


def _plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Gains by task, a bar for each number of clients."""
    with drawing(path, (9.6, 3.6)) as axes:
        tasks = list(dict.fromkeys(cell["task"] for cell in found))
        counts = list(dict.fromkeys(cell["clients"] for cell in found))
        for number, clients in enumerate(counts):
            mine = [cell for cell in found if cell["clients"] == clients]
            gains, spread = centred([ratios(cell, "auto", "off")[0] for cell in mine], np.median)
            places = np.array([tasks.index(cell["task"]) for cell in mine]) + (number - (len(counts) - 1) / 2) * 0.25
            axes.bar(places, gains, 0.22, yerr=spread, capsize=2, label=f"{clients} clients")
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.set_ylabel("tokens/s, with drafts / without")
        axes.legend(frameon=False)
