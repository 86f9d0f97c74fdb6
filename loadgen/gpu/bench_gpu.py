"""`ramet bench gpu`: correctness and speed of the GPU path.

Each part takes less than nine minutes, and goes on where it was ended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from loadgen.gpu import bicache, correctness, kernels, report, reuse, serving, shapes, speed
from loadgen.gpu.figures import Item, describe_machine, measure
from runtime.config import make_config
from runtime.errors import ModelError
from runtime.models.resolve import resolve_model

# In the order in which they teach.
PARTS = ("correctness", "kernels", "speed", "server", "bicache", "modules", "documents", "drafts")
_RESULTS = Path(__file__).parents[1] / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=_RESULTS, help=f"directory of the results; default: {_RESULTS}")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which nothing begins (default: 480)")
    parser.add_argument("--model", help="for correctness; default: the default model, else one with random weights")
    parser.add_argument("--tokenizer", type=Path, help="directory, for server and drafts; default: the default model's")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Measure the missing figures; 2 where there is no GPU, 3 if the time was up before the end."""
    if unknown := set(arguments.parts) - set(PARTS):
        print(f"ramet bench: gpu: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("ramet bench: gpu: torch finds no CUDA device", file=sys.stderr)
        return 2
    done, machine = True, describe_machine(arguments.device)
    with tempfile.TemporaryDirectory() as directory:
        for part in arguments.parts or PARTS:
            items = _items(part, arguments, Path(directory))
            done = measure(arguments.out / f"gpu-{part}.jsonl", items, arguments.limit, machine) and done
    report.write_page(arguments.out, PARTS)
    return 0 if done else 3


def _items(part: str, arguments: argparse.Namespace, directory: Path) -> Iterator[Item]:
    device, tiny = arguments.device, arguments.device == "cpu"
    if part == "kernels":
        return kernels.items(device)
    if part == "correctness":
        return correctness.items(_model(arguments.model), device, directory)
    if part == "speed":
        sizes = speed.TINY if tiny else speed.FULL
        return speed.items(shapes.write_shape(sizes.shape, directory), device, sizes)
    if part == "bicache":
        cases = bicache.TINY if tiny else bicache.FULL
        return bicache.items(shapes.write_shape(cases.shape, directory), device, cases)
    path = shapes.write_shape("llama-tiny" if tiny else "llama-8b", directory)
    if part == "modules":
        return reuse.modules(path, device)
    if part == "documents":
        return reuse.documents(path, device)
    source = arguments.tokenizer or _model(None)
    if source is None:
        raise FileNotFoundError(f"the part {part} needs a tokenizer: --tokenizer DIRECTORY")
    serving.with_tokenizer(path, source)
    if part == "drafts":
        return reuse.drafts(path, device)
    return serving.items(path, device, directory, (2,) if tiny else (32, 256), 0.1 if tiny else 1.0)


def _model(name: str | None) -> Path | None:
    """The directory of a model; None if none is named and the default one is unavailable."""
    try:
        return resolve_model(make_config(**({} if name is None else {"model": name})).model)
    except ModelError:
        if name is not None:
            raise
        return None
