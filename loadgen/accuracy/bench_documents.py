"""`ramet bench documents`: reuse of documents anywhere in a prompt beside full prefill, in process."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, track

from loadgen.accuracy.bench_quality import BATCH, Figures, compare
from loadgen.accuracy.documents import TASKS, tokenize, ways_of
from loadgen.accuracy.documents_report import PUBLISHED, plot, sections
from loadgen.accuracy.forced import Asker
from loadgen.accuracy.sections import show
from loadgen.http.outputs import add_files, write_files
from loadgen.micro.documents import FULL, METHODS, PREFIX, Documents, Shape, row_share, ways
from loadgen.micro.drive import model_path
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReuseParams

# Of the ways that are measured at all counts, by page.
_RATIO = 0.15
# Of the tasks' documents, which have about 200 tokens.
_LEAST_BY_PAGE = 0.15
# Methods whose throughput and pages are measured.
_SERVED = ("a3", "cacheblend", "legolink", "pie")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="measure times and pages")
    parser.add_argument("--quality", action="store_true", help="also compare answers with those of full prefill")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--ratios", type=_share, nargs="+", default=[0.05, _RATIO, 0.3], help="default: 0.05 0.15 0.3")
    parser.add_argument(
        "--granularities", nargs="+", choices=["page", "token"], default=["page", "token"], help="default: both"
    )
    parser.add_argument(
        "--full", action="store_true", help="ratios 0, 0.05, 0.15, 0.3, 1, by page and by token, at all counts; hours"
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 8, 15], help="of documents (default: 4 8 15)")
    parser.add_argument("--at", type=int, default=8, help="count at which all ways are measured (default: 8)")
    parser.add_argument("--tokens", type=int, default=512, help="of a document (default: 512)")
    parser.add_argument("--system", type=int, default=64, help="tokens of the system prompt (default: 64)")
    parser.add_argument("--question", type=int, default=32, help="tokens of a question (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each median (default: 5)")
    parser.add_argument("--clients", type=int, default=8, help="of the closed loop (default: 8)")
    parser.add_argument("--requests", type=int, default=8, help="of each of two closed loops (default: 8)")
    parser.add_argument("--output", type=int, default=16, help="output tokens of these (default: 16)")
    parser.add_argument("--readers", type=int, default=16, help="requests that read one document (default: 16)")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--items", type=int, default=200, help="questions of each task (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions (default: 0)")
    parser.add_argument("--merge", type=Path, metavar="JSON", help="of another run: parts that this one lacks")
    add_files(parser, "markdown", plot="write the plot as PNG or SVG; it needs the quality", json="write the figures")


def _share(text: str) -> float:
    if not 0 <= (share := float(text)) <= 1:
        raise ValueError
    return share


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    found: dict[str, Any] = {"settings": {}}
    if a.merge:
        found |= json.loads(a.merge.read_text("utf-8"))
    options = {"dtype": a.dtype} | ({} if a.threads is None else {"threads": a.threads})
    path = model_path(a.model)
    if a.speed:
        found |= _speed(path, a, options)
        found["settings"] |= _settings(a)
    if a.quality:
        for part, tasks in _quality(path, a, options).items():
            found[part] = found.get(part, {}) | tasks
    markdown = show(list(sections(found)), PUBLISHED)
    write_files(a, found, markdown, partial(plot, found) if "quality" in found else None)
    return 0


def _settings(a: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "system", "question", "repeats", "clients", "output", "readers")
    return {**{name: getattr(a, name) for name in names}, "clients_documents": _loop_count(a)}


def _grid(a: argparse.Namespace, at: int | None = None) -> dict[str, ReuseParams]:
    """The ways at a count of documents; None: all that are compared in quality."""
    if a.full:
        grid = ways(a.methods, [0, 0.05, 0.15, 0.3, 1], ["page", "token"])
    elif at in (None, a.at):
        grid = ways(a.methods, a.ratios, a.granularities)
    else:
        grid = ways(a.methods, [_RATIO], ["page"])
    return grid if at is not None else {name: asked for name, asked in grid.items() if not _is_no_page(asked)}


def _is_no_page(asked: ReuseParams) -> bool:
    """Whether the share of a task's documents that is computed again may be less than a page: nothing would be."""
    return asked.granularity == "page" and asked.ratio is not None and 0 < asked.ratio < _LEAST_BY_PAGE


def _loop_count(a: argparse.Namespace) -> int:
    return min(a.at, max(a.counts))


def _speed(path: Path, a: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    shape = Shape(a.tokens, a.system, a.question)
    running = max(a.clients, a.readers)
    # Room for the clients' prompts, each with the temporary pages of a dense look, and for what is cached besides.
    most, served_together = (a.system + count * a.tokens + a.question for count in (max(a.counts), _loop_count(a)))
    room = 4 * most + 3 * a.clients * served_together
    bench = Documents(path, max(a.counts), shape, max_running=running, pool_tokens=room, **options)
    served = [method for method in a.methods if method in _SERVED]
    loop = {FULL: None, PREFIX: None, **ways(served, [_RATIO], ["page"])}
    steps = sum(a.repeats * (2 + len(_grid(a, count))) for count in a.counts)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("time to first token", total=steps)
        first_s = bench.warm_up()
        bench.first(min(a.counts), _grid(a, min(a.counts)), 1, lambda: None)
        speed = {}
        for count in a.counts:
            measured = bench.first(count, _grid(a, count), a.repeats, lambda: progress.advance(bar))
            speed[str(count)] = {name: asdict(mine) for name, mine in measured.items()}
        rounds = [(again, name) for again in range(2) for name in loop]
        throughput: dict[str, list[float]] = {name: [] for name in loop}
        for _, name in progress.track(rounds, description="closed loop"):
            rate = bench.closed_loop(_loop_count(a), loop[name], a.clients, a.requests, a.output)
            throughput[name].append(rate)
        memory = {name: _pages(bench, asked, a) for name, asked in loop.items()}
    bench.close()
    return {"speed": speed, "throughput": throughput, "memory": memory, "encoding_s": first_s}


def _pages(bench: Documents, asked: ReuseParams | None, a: argparse.Namespace) -> dict[str, int]:
    document = -(-a.tokens // bench.core.info.page_size)
    return {"document": document, "one": bench.pages(asked, 1), "all": bench.pages(asked, a.readers)}


def _quality(path: Path, a: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    asker, tokenizer, grid = Asker(path, max_running=64, **options), Tokenizer.load(path), _grid(a)
    tasks: dict[str, Figures] = {}
    rows: dict[str, dict[str, float]] = {}
    page_size, num_layers = asker.core.info.page_size, asker.core.executor.spec.num_layers
    for task, batch in track(list(_batches(a)), description="asking", console=Console(stderr=True)):
        items = [TASKS[task](random.Random(f"{task} {a.seed} {number}")) for number in batch]
        prompts = [tokenize(item, tokenizer) for item in items]
        compare(asker, tokenizer, items, [ways_of(prompt, grid) for prompt in prompts], tasks.setdefault(task, {}))
        rows[task] = {name: row_share(asked, prompts, page_size, num_layers) for name, asked in grid.items()}
    asker.close()
    return {"quality": tasks, "rows": rows}


def _batches(a: argparse.Namespace) -> Iterator[tuple[str, range]]:
    for task in a.tasks:
        for first in range(0, a.items, BATCH):
            yield task, range(first, min(first + BATCH, a.items))
