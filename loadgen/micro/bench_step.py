"""`ramet bench step`: the parts of a decode step, of which all but the kernels keep one core, in process."""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.micro.drive import ClockedDrive, model_path
from loadgen.micro.intervals import shown
from runtime.execution.native.library import load_best
from runtime.protocol import StepEvents, encode

_SHARED, _OWN, _WARM = 2000, 64, 4
PARTS = ("schedule", "drafts", "plan", "launch", "kernels", "choice", "booking", "events", "other")
# How tokens are chosen.
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}
_COLUMNS = ("choice", "requests", "step, ms", *PARTS, "beside the kernels, ms [95 %]", "idle cores")

Cell = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--drafts", choices=["auto", "off"], default="off", help="default: off")
    parser.add_argument("--threads", type=int, default=2, help="of the kernels (default: 2)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="decoding requests")
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES), help="default: all")
    parser.add_argument("--steps", type=int, default=32, help="of each round (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="of each median (default: 5)")
    add_files(parser, "markdown", "plot", json="write the figures of every round")


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    bench = Steps(a)
    cells: dict[tuple[str, int], Cell] = {}
    try:
        for choice, batch in track([(c, b) for _ in range(a.rounds) for c in a.choices for b in a.batches], "steps"):
            cell = cells.setdefault((choice, batch), {"choice": choice, "batch": batch, "rounds": []})
            cell["rounds"].append(bench.measure(choice, batch, a.steps))
    finally:
        bench.close()
    found, rows = list(cells.values()), [_row(cell, a.threads) for cell in cells.values()]
    wide_console().print(make_table(f"milliseconds of a decode step, {a.threads} threads", _COLUMNS, rows, left=1))
    write_files(a, {"cells": found}, markdown_table(_COLUMNS, rows), partial(_plot, found))
    return 0


class Steps(ClockedDrive):
    """The steps of an engine core."""

    def __init__(self, arguments: argparse.Namespace):
        a = arguments
        options = {"dtype": a.dtype, "drafts": a.drafts, "threads": a.threads, "max_running": max(a.batches)}
        super().__init__(model_path(a.model), **options, pool_memory=2.0)
        core, library = self.core, load_best()
        self.clock(core.scheduler, "schedule", "schedule")
        self.clock(core.planner, "plan", "plan")
        self.clock(core.executor, "run", "launch")
        self.clock(core.decoding, "choose", "choice")
        self.clock(core, "_book", "booking")
        if core.drafter is not None:
            self.clock(core.drafter, "extend", "drafts")
        if library is not None:
            for name in ("decoder_forward", "argmax"):
                self.clock(library, name, "kernels")
        self._prefix = self.text(_SHARED)
        self.add(self._prefix, 1)
        self.first_tokens()

    def measure(self, choice: str, batch: int, steps: int) -> dict[str, float]:
        """Medians over steps, seconds: of each part, of the step, and of all cores' work on it."""
        for number in range(batch):
            own = self.text(_OWN + number % 16)  # so that pages end in different steps
            self.add(self._prefix + own, steps + _WARM + 2, sampling=CHOICES[choice])
        self.first_tokens()
        for _ in range(_WARM):
            self.step()
        found: list[dict[str, float]] = []
        for _ in range(steps):
            self.reset()
            started, cores = time.perf_counter(), time.process_time()
            events = self.core.step()
            written = time.perf_counter()
            encode(StepEvents(events))
            ended = time.perf_counter()
            parts = dict.fromkeys(PARTS, 0.0) | self.spent | {"events": ended - written}
            parts["other"] = ended - started - sum(parts.values())
            found.append(parts | {"step": ended - started, "cores": time.process_time() - cores})
        self.end_requests()
        return {name: statistics.median(one[name] for one in found) for name in found[0]}

    def end_requests(self) -> None:
        """Abort the open requests; the prefix stays cached."""
        for rid in list(self.core.requests):
            self.core.abort(rid)


def _text(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _row(cell: Cell, threads: int) -> list[str]:
    median = {name: statistics.median(one[name] for one in cell["rounds"]) for name in cell["rounds"][0]}
    return [
        *(cell["choice"], str(cell["batch"]), _text(median["step"])),
        *(_text(median[part]) for part in PARTS),
        shown(np.array([1e3 * (one["step"] - one["kernels"]) for one in cell["rounds"]]), ".2f", np.median),
        f"{max(threads * median['step'] - median['cores'], 0) / (threads * median['step']):.1%}",
    ]


def _plot(found: list[Cell], path: Path) -> None:
    """The parts beside the kernels, one bar for each cell."""
    with drawing(path, (9.6, 0.45 * len(found) + 1.4)) as axes:
        names = [f"{cell['choice']}, {cell['batch']}" for cell in found]
        left = np.zeros(len(found))
        for part in (part for part in PARTS if part != "kernels"):
            width = np.array([1e3 * statistics.median(one[part] for one in cell["rounds"]) for cell in found])
            axes.barh(names, width, left=left, label=part)
            left += width
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds of a step beside the kernels")
        axes.legend(frameon=False, fontsize=7)
