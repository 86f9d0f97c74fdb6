"""`ramet bench kernels`: the CPU kernels of one build or several, by rows, length of prompt, batch and context.

Weights and KV are bfloat16. A figure of one build is beside the same of the others, measured in turn. One thread is
timed by its CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track

from loadgen.http.files import write_json
from loadgen.http.options import count
from loadgen.http.outputs import add_files, drawing
from loadgen.http.tables import make_table, wide_console
from loadgen.micro.drive import matrix_weights, model_path
from loadgen.micro.intervals import shown
from loadgen.micro.timing import timed
from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span, causal_visible
from runtime.execution.attention.paged_index import rows_of
from runtime.execution.executor import ALL_THREADS
from runtime.execution.llama import LlamaModel
from runtime.execution.native import library as c
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.native.packed import PackedWeights, describe, packed_bytes
from runtime.kv.pool import KVPool
from runtime.models.spec import LlamaSpec
from runtime.models.weights import load_weights

_CPU, _PAGE, _OWN = torch.device("cpu"), 16, 80
_CHUNK = 256  # rows of a step, as the engine has them on a CPU
_REPEATS = 8  # of short calls
_PARTS = {
    "rows": f"all products of a layer, {_REPEATS} times, by rows",
    "prompt": f"whole prompts, in steps of {_CHUNK} rows, by tokens",
    "decode": f"decode steps behind {_OWN} tokens of their own, by requests",
    "shared": f"decode steps behind a shared prefix and {_OWN} tokens of their own, by requests",
}


class Case(NamedTuple):
    """A call to be timed, and its multiplications and additions."""

    part: str
    size: int
    build: str
    call: Callable[[], object]
    operations: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--builds", nargs="+", metavar="ISA|NAME=FILE", help="default: the best one")
    parser.add_argument("--rows", type=count, nargs="*", default=[1, 8, 16, 32, 64, 256], help="of products")
    parser.add_argument("--prompts", type=count, nargs="*", default=[256, 1024, 2048, 4096], help="tokens")
    parser.add_argument("--batches", type=count, nargs="*", default=[1, 8, 32, 64], help="decoding requests")
    parser.add_argument("--shared", type=count, default=2048, help="tokens of the shared prefix (default: 2048)")
    parser.add_argument("--threads", type=count, default=ALL_THREADS, help=f"default: {ALL_THREADS}")
    parser.add_argument("--rounds", type=count, default=15, help="of each median (default: 15)")
    add_files(parser, "plot", json="write all times, after each round")


def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    builds = [_build(name) for name in arguments.builds or _best()]
    if missing := [name for name, library in builds if library is None]:
        print(f"not built, not of this version, or not for this processor: {', '.join(missing)}")
        return 1
    bench = Bench(arguments, {name: library for name, library in builds if library is not None})
    cases = list(bench.cases())
    seconds: dict[str, list[float]] = {_key(case): [] for case in cases}
    for case in track(cases, description="warming up"):
        case.call()
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    for number in track(range(arguments.rounds), description="rounds"):
        for case in cases if number % 2 else cases[::-1]:  # no build is always the first
            time.sleep(0.02)  # torch's threads spin for a while after a call
            seconds[_key(case)].append(timed(case.call, clock))
        if arguments.json:
            write_json(arguments.json, {"threads": arguments.threads, "seconds": seconds})
    console = wide_console()
    for part, title in _PARTS.items():
        rows = [case for case in cases if case.part == part]
        if rows:
            console.print(_table(title, rows, seconds))
    if arguments.plot:
        _plot(cases, seconds, arguments.plot)
    return 0


def _best() -> list[str]:
    library = c.load_best()
    return ["any"] if library is None else [library.isa]


def _build(name: str) -> tuple[str, c.Library | None]:
    """A name and a library: of an instruction set (`avx2`), or from a file (`before=FILE`)."""
    name, _, file = name.partition("=")
    return name, c.open_library(name, Path(file)) if file else c.load(name)


def _key(case: Case) -> str:
    return f"{case.part} {case.size} {case.build}"


class Bench:
    """The model in every build, and the calls."""

    def __init__(self, arguments: argparse.Namespace, builds: dict[str, c.Library]):
        self._arguments = arguments
        path = model_path(arguments.model)
        self._spec = LlamaSpec.load(path)
        tokens = max([*arguments.prompts, arguments.shared + (_OWN + _PAGE) * max(arguments.batches, default=0)])
        self._pages = np.random.default_rng(0).permutation(tokens // _PAGE + 1).astype(np.int32)
        self._decoders = {name: self._load(path, library) for name, library in builds.items()}

    def _load(self, path: Path, library: c.Library) -> NativeDecoder:
        spec = self._spec
        model = LlamaModel(spec, load_weights(path, spec, torch.bfloat16), _CPU)
        shape = (spec.num_layers, len(self._pages), _PAGE, spec.num_kv_heads, spec.head_dim)
        pool = KVPool(*shape, torch.bfloat16, _CPU)
        for tensor in (pool.k, pool.v):
            tensor.normal_(generator=torch.Generator().manual_seed(0))
        return NativeDecoder(library, model, pool, self._arguments.threads)

    def cases(self) -> Iterator[Case]:
        """The same call of all builds in a row, so that they are measured under the same conditions."""
        given = self._arguments
        for rows in given.rows:
            weights, flops = (
                self._layer(),
                2.0 * matrix_weights(self._spec)[0] / self._spec.num_layers * rows * _REPEATS,
            )
            inputs = {k: torch.randn(rows, k) for _, k in (weight.shape for weight in weights)}
            yield Case("rows", rows, "torch", _torch_products(weights, inputs), flops)
            for name, decoder in self._decoders.items():
                yield Case("rows", rows, name, _products(decoder, weights, inputs), flops)
        for part, sizes in (("prompt", given.prompts), ("decode", given.batches), ("shared", given.batches)):
            for size in sizes:
                steps = list(self._prompt(size)) if part == "prompt" else [self._decode(size, part == "shared")]
                flops = sum(self._operations(step) for step in steps)
                for name, decoder in self._decoders.items():
                    yield Case(part, size, name, partial(_forward_all, decoder, steps), flops)

    def _layer(self) -> list[torch.Tensor]:
        spec = self._spec
        inner, heads = spec.num_heads * spec.head_dim, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        hidden, wide = spec.hidden_size, spec.intermediate_size
        return [
            torch.randn(n, k).bfloat16()
            for n, k in ((heads, hidden), (hidden, inner), (2 * wide, hidden), (hidden, wide))
        ]

    def _operations(self, step: ForwardBatch) -> float:
        """Of matrices and attention."""
        spec, plan = self._spec, step.groups[0].attention
        pairs = 0
        for edge in plan.edges:
            rows = len(rows_of(edge, plan.num_rows))
            pairs += rows * plan.spans[edge.span].length if edge.visible is None else int(edge.visible.sum())
        body, head = matrix_weights(spec)
        attention = 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
        return 2.0 * (body * len(step.tokens) + head * len(step.logits_rows)) + attention

    def _prompt(self, length: int) -> Iterator[ForwardBatch]:
        for start in range(0, length, _CHUNK):
            end = min(start + _CHUNK, length)
            span = Span(self._pages[: -(-end // _PAGE)], end)
            plan = AttentionPlan(end - start)
            plan.add(slice(0, end - start), span, causal_visible(end, end - start))
            last = torch.tensor([end - start - 1] if end == length else [], dtype=torch.int64)
            yield self._batch(plan, _slots(span, start), torch.arange(start, end), last)

    def _decode(self, batch: int, shared: bool) -> ForwardBatch:
        plan, slots = AttentionPlan(batch), []
        length = self._arguments.shared if shared else 0
        if shared:
            plan.add(slice(0, batch), Span(self._pages[: -(-length // _PAGE)], length))
        for row, pages in enumerate(np.split(self._pages[-(-length // _PAGE) :][: batch * _OWN // _PAGE], batch)):
            span = Span(pages, _OWN)
            plan.add(slice(row, row + 1), span)
            slots += _slots(span, _OWN - 1)
        return self._batch(plan, slots, torch.full((batch,), length + _OWN - 1), torch.arange(batch))

    def _batch(self, plan: AttentionPlan, slots: list[int], positions: torch.Tensor, out: torch.Tensor) -> ForwardBatch:
        tokens = torch.randint(0, self._spec.vocab_size, (plan.num_rows,))
        group = LayerGroup(range(self._spec.num_layers), None, torch.tensor(slots), plan)
        return ForwardBatch(tokens, positions, [group], out)


def _slots(span: Span, start: int) -> list[int]:
    return [int(span.pages[i // _PAGE]) * _PAGE + i % _PAGE for i in range(start, span.length)]


def _torch_products(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> Callable[[], object]:
    halves = [inputs[weight.shape[1]].bfloat16() for weight in weights]

    def call() -> None:
        for _ in range(_REPEATS):
            for half, weight in zip(halves, weights, strict=True):
                F.linear(half, weight)

    return call


def _forward_all(decoder: NativeDecoder, steps: Sequence[ForwardBatch]) -> None:
    for step in steps:
        decoder.forward(step)


def _products(
    decoder: NativeDecoder, weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]
) -> Callable[[], object]:
    """All products of a layer, each for itself."""
    library, team = decoder.library, decoder.team
    pack = PackedWeights(team, sum(packed_bytes(library, describe(weight)) for weight in weights))
    matrices, outs, products = [pack.add(weight) for weight in weights], [], []
    for weight, matrix in zip(weights, matrices, strict=True):
        a = inputs[weight.shape[1]]
        outs.append(torch.empty(len(a), len(weight)))
        rows = {"a": a.data_ptr(), "lda": a.stride(0), "m": len(a)}
        out = {"c": outs[-1].data_ptr(), "ldc": len(weight), "columns": len(weight)}
        products.append(c.Product(**rows, w=ctypes.pointer(matrix), **out))

    def call(kept: Any = (pack, matrices, inputs, outs)) -> None:
        for product in products * _REPEATS:
            library.multiply(team.handle, ctypes.byref(product))

    return call


def _table(title: str, cases: list[Case], seconds: dict[str, list[float]]) -> Any:
    builds = list(dict.fromkeys(case.build for case in cases))
    columns = [heading for build in builds for heading in (f"{build}, ms [95 %]", "GFLOP/s")]
    rng, rows = np.random.default_rng(0), []
    for size in dict.fromkeys(case.size for case in cases):
        row = [str(size)]
        for case in (case for case in cases if case.size == size):
            times = 1e3 * np.array(seconds[_key(case)])
            row += [shown(times, ".4g", np.median, rng), f"{case.operations / np.median(times) / 1e6:.0f}"]
        rows.append(row)
    return make_table(title, ["", *columns], rows, left=0)


def _plot(cases: list[Case], seconds: dict[str, list[float]], path: Path) -> None:
    with drawing(path, (12.8, 3.2), 1, len(_PARTS)) as panels:
        for axes, (part, title) in zip(panels, _PARTS.items(), strict=True):
            shown = [case for case in cases if case.part == part]
            for build in dict.fromkeys(case.build for case in shown):
                mine = [case for case in shown if case.build == build]
                sizes = [case.size for case in mine]
                rates = [case.operations / float(np.median(seconds[_key(case)])) / 1e9 for case in mine]
                axes.plot(sizes, rates, marker="o", label=build)
                axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.set(
                xscale="log",
                xlabel=title.rpartition("by ")[2],
                title=title.split(",")[0].replace(" behind", "\nbehind"),
            )
            axes.set_ylim(bottom=0)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.title.set_fontsize(8)
            axes.legend(fontsize=7)
        panels[0].figure.supylabel("GFLOP/s", fontsize=9)
