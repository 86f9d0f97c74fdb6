"""`ramet bench growth`: costs of the engine over context length and batch size, in process."""

from __future__ import annotations

import argparse
import statistics
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from loadgen.http.outputs import add_files, drawing, write_files
from loadgen.http.tables import make_table
from loadgen.micro.drive import Drive, matrix_weights, model_path
from loadgen.micro.timing import timed
from runtime.execution.executor import ALL_THREADS

_QUESTION = 64
_SHARED = 2048

Row = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--quantization", default="none", help="as of `ramet serve`")
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8000], help="tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64], help="decoding requests")
    parser.add_argument("--steps", type=int, default=24, help="decode steps of each median (default: 24)")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each median (default: 3)")
    add_files(parser, "plot", "json")


def run(arguments: argparse.Namespace) -> int:
    bench = Growth(arguments)
    figures: dict[str, Any] = {"backend": bench.core.info.attention_backend, "dtype": bench.core.info.dtype}
    bounds = figures["bounds"] = bench.bounds()
    figures["context"] = [bench.context(n) for n in track(arguments.contexts, description="context length")]
    figures["batch"] = [bench.batch(n) for n in track(arguments.batches, description="batch")]
    console = Console()
    console.print(
        f"{figures['backend']}, {figures['dtype']}: reads {bounds['gbytes_s']:.1f} GB/s from memory, multiplies "
        f"matrices at {bounds['gflop_s']:.0f} GFLOP/s in float32; at that pace a decode step takes "
        f"{bounds['decode_ms']:.1f} ms, and a prompt has {bounds['prefill_tok_s']:.0f} tokens/s"
    )
    for name in ("context", "batch"):
        rows = figures[name]
        lines = ([f"{value:.4g}" for value in row.values()] for row in rows)
        console.print(make_table(f"by {name}", list(rows[0]) if rows else [], lines, left=0))
    write_files(arguments, figures, plot=partial(_plot, figures))
    return 0


class Growth(Drive):
    """An engine core, and its costs."""

    def __init__(self, arguments: argparse.Namespace):
        self._steps, self._repeats = arguments.steps, arguments.repeats
        running = max(arguments.batches, default=1)
        options = {"dtype": arguments.dtype, "quantization": arguments.quantization, "max_running": running}
        super().__init__(model_path(arguments.model), **options, pool_memory=2.0)

    def bounds(self) -> Row:
        """Bounds by the machine: torch's product of a matrix and a vector, and of two matrices, on all threads."""
        spec, dtype = self.core.executor.spec, self.core.executor.dtype
        # In 8 bits, each 64 weights of a row have a scale in float32.
        weight_bytes = 1 + 4 / 64 if self.core.config.model.quantization == "int8" else dtype.itemsize
        torch.set_num_threads(ALL_THREADS)
        large, vector, square = torch.ones(8192, 8192), torch.ones(8192), torch.randn(2048, 2048)
        read_s = min(timed(lambda: large @ vector) for _ in range(10))
        multiply_s = min(timed(lambda: square @ square) for _ in range(10))
        torch.set_num_threads(1)
        body, head = matrix_weights(spec)
        gbytes_s, gflop_s = large.nbytes / read_s / 1e9, 2 * 2048**3 / multiply_s / 1e9
        return {
            "gbytes_s": gbytes_s,
            "gflop_s": gflop_s,
            "decode_ms": (body + head) * weight_bytes / gbytes_s / 1e6,
            "prefill_tok_s": gflop_s * 1e9 / (2 * body),
        }

    def context(self, length: int) -> Row:
        """TTFT of prompts of `length` tokens, uncached and with all but the last ones cached, and decoding behind."""
        cold, warm, decode = [], [], []
        for _ in range(self._repeats):
            prompt = self.text(length - _QUESTION)
            self.add(prompt, 1)
            cold.append(self.first_tokens())
            self.add(prompt + self.text(_QUESTION), 1 + self._steps)
            warm.append(self.first_tokens())
            decode += self.finish()
        first_s = statistics.median(cold)
        return {
            "tokens": length,
            "cold TTFT, ms": 1e3 * first_s,
            "prompt tokens/s": (length - _QUESTION) / first_s,
            f"TTFT, all but {_QUESTION} cached, ms": 1e3 * statistics.median(warm),
            "decode step, ms": 1e3 * statistics.median(decode),
        }

    def batch(self, size: int) -> Row:
        """Steps of `size` requests that decode together, with prompts of their own, and behind a shared prefix."""
        own_s = self._decode_together([self.text(_QUESTION) for _ in range(size)])
        prefix = self.text(_SHARED)
        self.add(prefix, 1)
        self.first_tokens()
        shared_s = self._decode_together([prefix + self.text(_QUESTION) for _ in range(size)])
        return {
            "requests": size,
            "step, ms": 1e3 * own_s,
            "output tokens/s": size / own_s,
            f"step behind {_SHARED} shared, ms": 1e3 * shared_s,
            f"output tokens/s behind {_SHARED} shared": size / shared_s,
        }

    def _decode_together(self, prompts: list[array[int]]) -> float:
        """Median seconds of a step."""
        for prompt in prompts:
            self.add(prompt, 1 + self._steps)
        self.first_tokens()
        return statistics.median(self.finish())


def _plot(figures: dict[str, Any], path: Path) -> None:
    with drawing(path, (9.6, 3.4), 1, 2) as (left, right):
        for axes, rows in ((left, figures["context"]), (right, figures["batch"])):
            names = list(rows[0])
            shown = [name for name in names[1:] if name.endswith("ms")] if axes is left else names[2::2]
            for name in shown:
                axes.plot([row[names[0]] for row in rows], [row[name] for row in rows], marker="o", label=name)
            axes.set_xscale("log", base=2)
            axes.set_xticks([row[names[0]] for row in rows], [f"{row[names[0]]:.0f}" for row in rows])
            axes.set_xlabel("tokens of context" if axes is left else "requests that decode together")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
        left.set_yscale("log")
        left.set_ylabel("milliseconds")
        right.set_ylabel("tokens/s")
