"""`ramet bench quality`: answers behind prompt modules beside full attention, on tasks of a small model, in process."""

from __future__ import annotations

import argparse
import random
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from loadgen.accuracy.forced import Ask, Asker
from loadgen.accuracy.parts import TASKS, Item
from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.micro.drive import model_path
from loadgen.micro.intervals import centred, shown
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.modules.schema import Mode, Schema

FULL = "full attention"
# Items that run together, in all ways.
BATCH = 8
# Greedy tokens beyond the length of the right answer.
_MORE = 4
COLUMNS = ("task", "", "NLL", "more than full [95 %]", "KL [95 %]", "KL, p95", "right, %", "points to full [95 %]")

# By way: "nll", nats a token, and "right", a value for each item; "kl", nats, a list of its tokens for each item.
Figures = dict[str, dict[str, list[Any]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--items", type=int, default=200, help="questions of each task (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions; default: 0")
    add_files(parser, "markdown", "plot", json="write the figures of every question")


def run(arguments: argparse.Namespace) -> int:
    threads = {} if arguments.threads is None else {"threads": arguments.threads}
    path = model_path(arguments.model)
    asker = Asker(path, dtype=arguments.dtype, max_running=64, **threads)
    tokenizer = Tokenizer.load(path)
    tasks: dict[str, Figures] = {}
    batches = [range(i, min(i + BATCH, arguments.items)) for i in range(0, arguments.items, BATCH)]
    work = [(task, batch) for task in arguments.tasks for batch in batches]
    for task, batch in track(work, description="asking", console=Console(stderr=True)):
        items = [TASKS[task](random.Random(f"{task} {arguments.seed} {number}")) for number in batch]
        measure(asker, tokenizer, items, tasks.setdefault(task, {}))
    rows = {task: list(task_rows(task, figures)) for task, figures in tasks.items()}
    table = make_table(f"{arguments.items} questions a task, {asker.core.info.dtype}", COLUMNS, left=2)
    for several in rows.values():
        for row in several:
            table.add_row(*row)
        table.add_section()
    wide_console().print(table)
    data = {"dtype": asker.core.info.dtype, "items": arguments.items, "tasks": tasks}
    markdown = markdown_table(COLUMNS, [row for several in rows.values() for row in several])
    write_files(arguments, data, markdown, partial(_plot, tasks))
    asker.close()
    return 0


def measure(asker: Asker, tokenizer: Tokenizer, items: Sequence[Item], figures: Figures) -> None:
    """Ask some questions in all ways, and add what is found."""
    compare(
        asker, tokenizer, items, [ways_of(item, tokenizer, asker.core.info.context_length) for item in items], figures
    )


def compare(
    asker: Asker, tokenizer: Tokenizer, items: Sequence[Item], ways: Sequence[dict[str, Ask]], figures: Figures
) -> None:
    """Ask some questions, each in its ways, of which full attention is the first, and add what is found."""
    golds = [tokenizer.encode(item.answer, add_special_tokens=False) for item in items]
    asked = [
        (item, gold, way, ask) for item, gold, mine in zip(items, golds, ways, strict=True) for way, ask in mine.items()
    ]
    found = asker.forced([ask for _, _, _, ask in asked], [[*gold, gold[-1]] for _, gold, _, _ in asked])
    best = [logprobs.argmax(-1).tolist() for logprobs in found]
    # Where each best token is the right one, the greedy answer is known, up to the token behind it.
    known = [tokens[:-1] == gold for tokens, (_, gold, _, _) in zip(best, asked, strict=True)]
    open_asks = [ask for (_, _, _, ask), is_known in zip(asked, known, strict=True) if not is_known]
    fresh = iter(asker.greedy(open_asks, max(map(len, golds)) + _MORE))
    said = [tokens if is_known else next(fresh) for tokens, is_known in zip(best, known, strict=True)]
    asker.end()
    full = torch.empty(0)
    for (item, gold, way, _), behind, tokens in zip(asked, found, said, strict=True):
        logprobs = behind[:-1]
        full = logprobs if way == FULL else full
        mine = figures.setdefault(way, {"nll": [], "kl": [], "right": []})
        mine["nll"].append(-float(logprobs[range(len(gold)), gold].mean()))
        mine["kl"].append((full.exp() * (full - logprobs)).sum(-1).tolist())
        mine["right"].append(float(item.is_right(tokenizer.decode(tokens))))


def ways_of(item: Item, tokenizer: Tokenizer, context_length: int) -> dict[str, Ask]:
    """The same tokens in every way; with full attention, which comes first, without the gaps of unions."""
    lead = [] if item.question is None else tokenizer.encode(item.lead, add_special_tokens=False)

    def ask(mode: Mode, scaffolds: list[list[str]] | None = None) -> Ask:
        schema = Schema.read(item.schema(), tokenizer, context_length, mode, scaffolds)
        prompt = schema.compile(item.prompt())
        return Ask(prompt.tokens + lead, prompt.reuse)

    paths = [f"/m{number}" for number in range(len(item.parts))]
    whole = ask("scaffold", [["/", *paths]])
    assert whole.reuse is not None
    (entry,) = whole.reuse["entries"]
    ways = {
        FULL: Ask(array("i", entry["tokens"]).tolist() + whole.tokens),
        "independent": ask("independent"),
        "nested": ask("nested"),
    }
    if item.pairs:
        ways["a scaffold of each pair"] = ask("scaffold", [[paths[a], paths[b]] for a, b in item.pairs])
    return {**ways, "a scaffold of all": whole}


def task_rows(task: str, figures: Figures, seed: int = 0) -> Iterator[list[str]]:
    """A row for each way. Intervals are by a bootstrap over the questions; differences are those of the same one."""
    rng = np.random.default_rng(seed)
    full = figures[FULL]
    for way, mine in figures.items():
        nll, right = np.array(mine["nll"]), np.array(mine["right"])
        cells = [task, way, f"{nll.mean():.3f}", "", "", "", f"{100 * right.mean():.1f}", ""]
        if way != FULL:
            tokens = np.concatenate(mine["kl"])
            cells[3] = shown(nll - np.array(full["nll"]), "+.3f", rng=rng)
            cells[4] = shown(np.array([np.mean(kl) for kl in mine["kl"]]), ".4f", rng=rng)
            cells[5] = f"{np.percentile(tokens, 95):.4f}"
            cells[7] = shown(100 * (right - np.array(full["right"])), "+.1f", rng=rng)
        yield cells


def _plot(tasks: dict[str, Figures], path: Path) -> None:
    """NLL beyond that of full attention, a group for each task."""
    with drawing(path, (9.6, 3.6)) as axes:
        ways = list(dict.fromkeys(way for figures in tasks.values() for way in figures if way != FULL))
        for number, way in enumerate(ways):
            beside = (number - (len(ways) - 1) / 2) / (len(ways) + 1)
            have = [(place, figures) for place, figures in enumerate(tasks.values()) if way in figures]
            more = [np.array(figures[way]["nll"]) - np.array(figures[FULL]["nll"]) for _, figures in have]
            axes.errorbar([place + beside for place, _ in have], *centred(more), fmt="o", capsize=3, label=way)
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_xticks(range(len(tasks)), list(tasks))
        axes.set_ylabel("NLL of the right answer beyond\nfull attention, nats a token")
        axes.grid(alpha=0.3, axis="y")
        axes.figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right center")
