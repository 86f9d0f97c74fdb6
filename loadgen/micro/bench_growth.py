"""`ramet bench growth`: how the engine's costs grow with context, batch, cached nodes and waiting requests.

Without a server, so that nothing but the engine is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loadgen.micro.timing import timed

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore

_QUESTION = 64
_SHARED = 2048

Row = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto", help="default: auto")
    parser.add_argument("--quantization", default="none", help="as of `ramet serve`")
    parser.add_argument("--contexts", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8000], help="tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64], help="requests that decode")
    parser.add_argument("--steps", type=int, default=24, help="decode steps that each median is of")
    parser.add_argument("--repeats", type=int, default=3, help="prompts that each median is of")
    parser.add_argument("--plot", metavar="FILE", help="write the plots as PNG or SVG")
    parser.add_argument("--json", metavar="FILE", help="write the figures")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print tables."""
    bench = Growth(arguments)
    figures: dict[str, Any] = {"backend": bench.core.info.attention_backend, "dtype": bench.core.info.dtype}
    figures["bounds"] = bench.bounds()
    figures["context"] = [bench.context(n) for n in track(arguments.contexts, description="context length")]
    figures["batch"] = [bench.batch(n) for n in track(arguments.batches, description="batch")]
    console = Console()
    bounds = figures["bounds"]
    console.print(
        f"{figures['backend']}, {figures['dtype']}: reads {bounds['gbytes_s']:.1f} GB/s from memory, multiplies "
        f"matrices at {bounds['gflop_s']:.0f} GFLOP/s in float32; at that pace a decode step takes "
        f"{bounds['decode_ms']:.1f} ms, and a prompt has {bounds['prefill_tok_s']:.0f} tokens/s"
    )
    for name in ("context", "batch"):
        table = Table(title=f"by {name}")
        for column in figures[name][0] if figures[name] else ():
            table.add_column(column, justify="right")
        for row in figures[name]:
            table.add_row(*(f"{value:.4g}" for value in row.values()))
        console.print(table)
    if arguments.plot:
        _plot(figures, arguments.plot)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


class Growth:
    """An engine core, driven step by step."""

    def __init__(self, arguments: argparse.Namespace):
        # Not at the top: the other commands read these options, too, and do without torch.
        from runtime.config import make_config
        from runtime.engine.core import EngineCore
        from runtime.models.resolve import resolve_model

        given = {} if arguments.model is None else {"model": arguments.model}
        running = max(arguments.batches, default=1)
        given |= {"dtype": arguments.dtype, "quantization": arguments.quantization}
        config = make_config(**given, pool_memory=2.0, max_running=running)
        self.core: EngineCore = EngineCore(config, resolve_model(config.model))
        self._steps, self._repeats = arguments.steps, arguments.repeats
        self._draw, self._count = random.Random(), 0

    def bounds(self) -> Row:
        """What torch gets out of the machine on all threads: a matrix times a vector, and a product of two matrices."""
        import torch

        from runtime.execution.executor import ALL_THREADS

        spec, dtype = self.core.executor.spec, self.core.executor.dtype
        # In 8 bits, each 64 of a row have a scale in float32.
        weight_bytes = 1 + 4 / 64 if self.core.config.model.quantization == "int8" else dtype.itemsize
        torch.set_num_threads(ALL_THREADS)
        large, vector, square = torch.ones(8192, 8192), torch.ones(8192), torch.randn(2048, 2048)
        read_s = min(timed(lambda: large @ vector) for _ in range(10))
        multiply_s = min(timed(lambda: square @ square) for _ in range(10))
        torch.set_num_threads(1)
        layer = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
        layer += 3 * spec.hidden_size * spec.intermediate_size
        body, head = layer * spec.num_layers, spec.vocab_size * spec.hidden_size
        gbytes_s, gflop_s = large.nbytes / read_s / 1e9, 2 * 2048**3 / multiply_s / 1e9
        return {
            "gbytes_s": gbytes_s,
            "gflop_s": gflop_s,
            "decode_ms": (body + head) * weight_bytes / gbytes_s / 1e6,
            "prefill_tok_s": gflop_s * 1e9 / (2 * body),
        }

    def context(self, length: int) -> Row:
        """Prompts of that length, cold, then with a question more; and decoding behind them."""
        cold, warm, decode = [], [], []
        for _ in range(self._repeats):
            prompt = self._text(length - _QUESTION)
            cold.append(self._first_token([prompt], 1))
            warm.append(self._first_token([prompt + self._text(_QUESTION)], 1 + self._steps))
            decode += self._finish()
        first_s = statistics.median(cold)
        return {
            "tokens": length,
            "cold TTFT, ms": 1e3 * first_s,
            "prompt tokens/s": (length - _QUESTION) / first_s,
            f"TTFT, all but {_QUESTION} cached, ms": 1e3 * statistics.median(warm),
            "decode step, ms": 1e3 * statistics.median(decode),
        }

    def batch(self, size: int) -> Row:
        """That many requests that decode together: with prompts of their own, and behind a shared prefix."""
        self._first_token([self._text(_QUESTION) for _ in range(size)], 1 + self._steps)
        own_s = statistics.median(self._finish())
        prefix = self._text(_SHARED)
        self._first_token([prefix], 1)
        self._first_token([prefix + self._text(_QUESTION) for _ in range(size)], 1 + self._steps)
        shared_s = statistics.median(self._finish())
        return {
            "requests": size,
            "step, ms": 1e3 * own_s,
            "output tokens/s": size / own_s,
            f"step behind {_SHARED} shared, ms": 1e3 * shared_s,
            f"output tokens/s behind {_SHARED} shared": size / shared_s,
        }

    def _text(self, length: int) -> array[int]:
        return array("i", self._draw.choices(range(self.core.info.vocab_size), k=length))

    def _first_token(self, prompts: list[array[int]], output: int) -> float:
        """Seconds until all of some prompts have their first token."""
        from runtime.params import SamplingParams
        from runtime.protocol import AddRequest

        sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=output).model_dump()
        start = time.perf_counter()
        for prompt in prompts:
            self._count += 1
            self.core.handle(AddRequest(f"{self._count}", prompt.tobytes(), sampling))
        while any(not request.num_output for request in self.core.requests.values()):
            self.core.step()
        return time.perf_counter() - start

    def _finish(self) -> list[float]:
        """Decode to the end; seconds of each step with all of them."""
        full, times = len(self.core.requests), []
        while self.core.busy:
            seconds = timed(self.core.step)
            if len(self.core.requests) == full:
                times.append(seconds)
        return times


def _plot(figures: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
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
    figure.savefig(path, dpi=130)
