"""`ramet bench lora`: CPU time of decode steps and of prefill with low-rank adapters, beside the model alone."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from safetensors.torch import save_file

from loadgen.http.options import count, whole
from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.micro.drive import Drive, model_path
from loadgen.micro.intervals import shown
from radix import Namespace
from runtime.models.spec import LlamaSpec
from runtime.protocol import LoadAdapter

_CODE: dict[str, dict[str, Any]] = {
    "native": {},
    "native, int8": {"quantization": "int8"},
    "torch": {"native_kernels": False},
    "transformers": {"model_impl": "transformers"},
}
_LABELS = {0: "the model alone", 1: "one adapter"}


class Cell(NamedTuple):
    """Requests that run together; they take turns with so many adapters."""

    code: str
    requests: int
    adapters: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument("--model", help="of Ramet's own code, unless --adapters is 0; default: the default model")
    parser.add_argument("--random-weights", action="store_true", help="of a model without safetensors")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--code", nargs="+", choices=_CODE, default=[*_CODE][:3], help="default: all of Ramet's own")
    parser.add_argument("--rank", type=count, default=16, help="of the adapters, of every linear layer (default: 16)")
    parser.add_argument("--requests", type=count, nargs="+", default=[1, 8], help="that run together (default: 1 8)")
    parser.add_argument("--adapters", type=whole, nargs="+", default=[0, 1, 4], help="default: 0 1 4")
    parser.add_argument("--prompt", type=count, default=128, help="tokens of each request (default: 128)")
    parser.add_argument("--steps", type=count, default=16, help="of decoding (default: 16)")
    parser.add_argument("--rounds", type=count, default=7, help="of each median (default: 7)")
    add_files(parser, "markdown", "plot", json="write the figures of every round")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    a = arguments
    path = model_path(a.model)
    cells = [Cell(code, n, k) for code in a.code for n in a.requests for k in a.adapters if k <= n]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        adapters = [_save(Path(directory) / str(i), LlamaSpec.load(path), a.rank, i) for i in range(max(a.adapters))]
        drives, digests = {}, {}
        for code in a.code:
            pool = 2 * max(a.requests) * (a.prompt + a.steps + 32)
            options = {"dtype": a.dtype, "random_weights": a.random_weights, "pool_tokens": pool, **_CODE[code]}
            drives[code] = drive = Drive(path, threads=1, **options)
            stack.callback(drive.close)
            found = [drive.core.admin.handle(LoadAdapter(1, str(adapter))).result for adapter in adapters]
            digests[code] = [one["digest"] for one in found]
        times: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in cells}
        # The first round warms up.
        for number in track(range(a.rounds + 1), description="lora"):
            for cell in cells[:: -1 if number % 2 else 1]:
                took = _measure(drives[cell.code], cell, digests[cell.code][: cell.adapters], a)
                times[cell] += [took] if number else []
    rows = [_row(cell, times, a) for cell in cells]
    prefill = f"prefill of {a.prompt} tokens each, CPU ms"
    columns = ("", "requests", "adapters", "step, CPU ms [95 %]", "times the model's", prefill, "times the model's")
    wide_console().print(make_table(f"adapters of rank {a.rank}", columns, rows))
    figures = {"cells": [{**cell._asdict(), "step_s prefill_s": took} for cell, took in times.items()]}
    write_files(a, figures, markdown_table(columns, rows), partial(_plot, times, a))
    return 0


def _save(directory: Path, spec: LlamaSpec, rank: int, seed: int) -> Path:
    """Write a random adapter of every linear layer but experts, as PEFT does."""
    directory.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in spec.expected_tensors().items():
        if name.endswith("_proj.weight") and ".experts." not in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, shape[1], generator=draw) / shape[1]
            tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], rank, generator=draw) / rank
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _measure(drive: Drive, cell: Cell, digests: list[str], a: argparse.Namespace) -> tuple[float, float]:
    """CPU seconds of a decode step, and of all prefill before it; every request is new."""
    for i in range(cell.requests):
        namespace = Namespace(adapter=digests[i % len(digests)]) if digests else Namespace()
        drive.add(drive.text(a.prompt), a.steps + 2, namespace=namespace)
    start = time.process_time()
    drive.first_tokens()
    prefilled = time.process_time()
    drive.pace(a.steps)
    end = time.process_time()
    drive.end()
    return (end - prefilled) / a.steps, prefilled - start


def _row(cell: Cell, times: dict[Cell, list[tuple[float, float]]], a: argparse.Namespace) -> list[str]:
    row, draw = [cell.code, str(cell.requests), str(cell.adapters)], np.random.default_rng(0)
    alone = times.get(cell._replace(adapters=0))
    for took, base in zip(np.array(times[cell]).T, np.array(alone or times[cell]).T, strict=True):
        row.append(shown(1000 * took, ".1f", np.median, draw))
        row.append(f"{np.median(took) / np.median(base):.2f}" if cell.adapters and alone else "")
    return row


def _plot(times: dict[Cell, list[tuple[float, float]]], a: argparse.Namespace, path: Path) -> None:
    groups = [(code, n) for code in a.code for n in a.requests]
    with drawing(path, (9.6, 3.2), 1, 2) as panels:
        for part, (axes, what) in enumerate(zip(panels, ("a decode step", "prefill"), strict=True)):
            for i, count in enumerate(a.adapters):
                bars = [(x, times[Cell(*group, count)]) for x, group in enumerate(groups) if count <= group[1]]
                places = [x + 0.26 * (i - (len(a.adapters) - 1) / 2) for x, _ in bars]
                middle = [1000 * float(np.median([each[part] for each in took])) for _, took in bars]
                axes.bar(places, middle, 0.24, label=_LABELS.get(count, f"{count} adapters"))
            axes.set_xticks(range(len(groups)), [f"{code}\n{n} requests" for code, n in groups], fontsize=7)
            axes.set_ylabel(f"CPU ms of {what}")
        panels[0].legend(frameon=False)
