"""`ramet bench blocks`: tokens per CPU second and rows of block diffusion, with a new prefix and with a shared one."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track

from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table, markdown_table, wide_console
from loadgen.micro.drive import Drive
from loadgen.micro.intervals import centred, shown

_COLUMNS = ("", "new prefix, tokens/CPU s [95 %]", "shared prefix", "reused", "rows a token, new", "shared", "decoding")
# The shapes of the default model; what is generated means nothing, and costs the same.
_SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "mask_token_id": 3,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


class Contender(NamedTuple):
    """A model, and fields of `DiffusionParams` of its requests."""

    name: str
    drive: Drive
    fields: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--layers", type=int, default=30, help="of the models, whose weights are random (default: 30)")
    parser.add_argument("--prefix", type=int, default=512, help="shared tokens (default: 512)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt that follow (default: 16)")
    parser.add_argument("--output", type=int, default=64, help="new tokens (default: 64)")
    parser.add_argument("--block", type=int, default=4, help="positions of a block (default: 4)")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 2, 1], help="of a block (default: 4 2 1)")
    parser.add_argument("--rounds", type=int, default=7, help="of each median (default: 7)")
    add_files(parser, "markdown", "plot", json="write the figures of every round")


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        drives = {}
        for name, architecture in (("causal", "Qwen3ForCausalLM"), ("blocks", "SDARForCausalLM")):
            drives[name] = _open(Path(directory) / name, architecture, a)
            stack.callback(drives[name].close)
        contenders = [Contender("causal", drives["causal"], {})]
        contenders += [Contender(f"blocks, {n} steps each", drives["blocks"], {"steps": n}) for n in a.steps]
        found = _measure(contenders, a)
    rows = [_row(name, requests, a.output) for name, requests in found.items()]
    title = f"{a.prefix} + {a.prompt} tokens, {a.output} new ones, blocks of {a.block}"
    wide_console().print(make_table(title, _COLUMNS, rows))
    write_files(a, {"requests": found}, markdown_table(_COLUMNS, rows), partial(_plot, found, a.output))
    return 0


def _open(directory: Path, architecture: str, a: argparse.Namespace) -> Drive:
    directory.mkdir()
    config = {**_SHAPE, "num_hidden_layers": a.layers, "block_length": a.block, "architectures": [architecture]}
    (directory / "config.json").write_text(json.dumps(config))
    pool = 8 * (a.prefix + a.prompt + a.output + 64)
    return Drive(directory, random_weights=True, dtype=a.dtype, threads=1, pool_tokens=pool)


def _measure(contenders: list[Contender], a: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Of each round two requests, one behind a new prefix and one behind the same; the contenders take turns."""
    draw = random.Random(0)
    found: dict[str, list[dict[str, float]]] = {one.name: [] for one in contenders}
    for number in track(range(a.rounds + 1), description="blocks"):
        prefix = draw.choices(range(4, 290), k=a.prefix)
        for name, drive, fields in contenders[:: -1 if number % 2 else 1]:
            drive.end()
            pair = [_request(drive, prefix + draw.choices(range(4, 290), k=a.prompt), a.output, fields) for _ in "12"]
            # The first round warms up.
            found[name] += pair if number else []
    return found


def _request(drive: Drive, prompt: list[int], output: int, fields: dict[str, Any]) -> dict[str, float]:
    """CPU seconds of all threads, rows that were computed, of these the ones after the prompt, and the reused share."""
    core = drive.core
    rows, prefill = (core.counters[name] for name in ("row_layers", "prefill_tokens"))
    started = time.process_time()
    last = drive.alone(prompt, output, **fields)
    seconds = time.process_time() - started
    computed = (core.counters["row_layers"] - rows) / core.executor.spec.num_layers
    decoding = computed - (core.counters["prefill_tokens"] - prefill)
    return {"seconds": seconds, "rows": computed, "decoding": decoding, "reused": last.cached_tokens / len(prompt)}


def _speeds(requests: list[dict[str, float]], shared: bool, output: int) -> np.ndarray:
    return np.array([output / request["seconds"] for request in requests[int(shared) :: 2]])


def _row(name: str, requests: list[dict[str, float]], output: int) -> list[str]:
    cells, draw = [name], np.random.default_rng(0)
    cells += [shown(_speeds(requests, shared, output), ".1f", np.median, draw) for shared in (False, True)]
    cells.append(f"{requests[1]['reused']:.1%}")
    cells += [f"{requests[i]['rows'] / output:.2f}" for i in (0, 1)]
    return [*cells, f"{requests[1]['decoding'] / output:.2f}"]


def _plot(found: dict[str, list[dict[str, float]]], output: int, path: Path) -> None:
    with drawing(path, (7.2, 3.2)) as axes:
        places = np.arange(len(found))
        for shared, label in ((False, "new prefix"), (True, "shared prefix")):
            every = [_speeds(requests, shared, output) for requests in found.values()]
            middle, spread = centred(every, np.median)
            axes.bar(places + 0.4 * shared - 0.2, middle, 0.36, yerr=spread, capsize=2, label=label)
        axes.set_xticks(places, list(found))
        axes.set_ylabel("tokens per CPU second")
        axes.legend(frameon=False)
