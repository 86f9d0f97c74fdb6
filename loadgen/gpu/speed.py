"""Speed of a causal model on the GPU, over what its memory and its matrix units allow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loadgen.gpu.drive import OneAtATime, WatchedDrive
from loadgen.gpu.figures import Figures, Item
from loadgen.gpu.gaps import profile_gaps
from loadgen.micro.drive import matrix_weights
from loadgen.micro.timing import timed


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; all but `shape` are tokens, rows, requests or steps."""

    shape: str
    context: int
    prefix: int
    question: int
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    shared_batch: int
    steps: int


FULL = Sizes("llama-8b", 1024, 4096, 128, (1, 32, 128), (512, 1024, 2048, 4096, 8192), 32, 24)
TINY = Sizes("llama-tiny", 32, 64, 8, (1, 3), (32, 64), 3, 3)


def items(path: Path, device: str, sizes: Sizes) -> Iterator[Item]:
    """The measurements, one engine after the other."""
    yield "bounds of this machine", partial(bounds, device)
    running = max(*sizes.batches, sizes.shared_batch)
    options = {"device": device, "random_weights": True, "max_running": running, "dtype": "bfloat16"}
    if device == "cpu":
        options |= {"pool_tokens": 8192, "kernels": "torch"}

    def opening(**more: Any) -> Speed:
        return Speed(path, sizes, {**options, **more})

    with closing(OneAtATime(opening)) as engine:
        on = engine.call
        for batch in sizes.batches:
            name = f"decode, {batch} x {sizes.context}"
            yield name, partial(on, partial(Speed.decode, batch=batch))
            yield f"{name}, eager", partial(on, partial(Speed.eager, batch=batch))
            yield f"{name}, in step and one step ahead", partial(on, partial(Speed.ahead, batch=batch))
        yield "warm and cold", partial(on, Speed.ttft)
        name = f"{sizes.shared_batch} behind {sizes.prefix} shared"
        yield name, partial(on, partial(Speed.shared, eager=False))
        yield f"{name}, eager", partial(on, partial(Speed.shared, eager=True))
        for chunk in sizes.chunks:
            yield f"prefill, {chunk} rows a step", partial(on, Speed.prefill, step_tokens=chunk)
        for batch in sizes.batches:
            eighth = partial(on, partial(Speed.decode, batch=batch), kv_dtype="fp8")
            yield f"decode, {batch} x {sizes.context}, fp8 KV", eighth


def bounds(device: str) -> Figures:
    """Bytes that a copy reads and writes, and operations of a matrix product, per second."""
    size = 1 << 30 if device == "cuda" else 1 << 22
    n = 8192 if device == "cuda" else 256
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    square = torch.randn(n, n, device=device).bfloat16()

    def seconds(work: Callable[[], object]) -> float:
        def once() -> None:
            work()
            if device == "cuda":
                torch.cuda.synchronize()

        once()
        return min(timed(once) for _ in range(10))

    copied_s, multiplied_s = seconds(lambda: target.copy_(source)), seconds(lambda: square @ square)
    return {"copy, TB/s": 2 * size / copied_s / 1e12, "matrix product, TFLOP/s": 2 * n**3 / multiplied_s / 1e12}


# Measured on an H200; the table has the machine's own beside them.
_BYTES_S, _FLOP_S = 4.3e12, 780e12


class Speed(WatchedDrive):
    """The measurements of one engine."""

    def __init__(self, path: Path, sizes: Sizes, options: dict[str, Any]):
        super().__init__(path, **options)
        self.sizes = sizes
        spec = self.core.executor.spec
        self._body, self._head = matrix_weights(spec)
        self._row_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        self._row_bytes *= self.core.executor.pool.k.dtype.itemsize

    def decode(self, batch: int) -> Figures:
        """Steps of requests without a shared prefix, beside the time to read weights and KV; host time by part."""
        steps = self.sizes.steps
        with self._decoding(batch, 3 * steps + 3):
            self.pace(3)
            self.watch()
            step_s = statistics.median(self.pace(steps) for _ in range(3))
            host_ms = {f"{name}, ms": 1e3 * value / (3 * steps) for name, value in self.spent.items()}
        weights = (self._body + self._head) * self.core.executor.dtype.itemsize
        bound_s = (weights + batch * self.sizes.context * self._row_bytes) / _BYTES_S
        return {
            "step, ms": 1e3 * step_s, "bound, ms": 1e3 * bound_s, "of the bound, %": 100 * bound_s / step_s,
            "tokens/s": batch / step_s, **host_ms,
        }  # fmt: skip

    @contextmanager
    def _decoding(self, batch: int, steps: int) -> Iterator[None]:
        """Requests that all decode for at least so many steps, while entered."""
        try:
            for _ in range(batch):
                self.add(self.text(self.sizes.context), steps + 8)
            self.first_tokens()
            yield
        finally:
            self.end()

    def ahead(self, batch: int) -> Figures:
        """`decode` in step and one step ahead: the share of host time that is hidden, and the gaps of the device."""
        steps, usual, found = self.sizes.steps, self.core.overlap, {}
        with self._decoding(batch, 4 * steps + 16):
            for name, self.core.overlap in (("in step", False), ("ahead", True)):
                self.pace(3)
                self.watch()
                step_s = self.pace(steps)
                found[f"{name}, ms"] = 1e3 * step_s
                found[f"host {name}, ms"] = 1e3 * sum(self.spent.values()) / steps
                gaps = profile_gaps(lambda: self.pace(min(steps, 8)), self.core.executor.device.type)
                found |= {f"{figure} ({name})": value for figure, value in gaps.items()}
            self.core.overlap = usual
        gained = found["in step, ms"] - found["ahead, ms"]
        return {**found, "host time hidden, %": 100 * gained / found["host in step, ms"]}

    def eager(self, batch: int) -> Figures:
        """`decode` without CUDA graphs."""
        with self.without(_graphs=None):
            return self.decode(batch)

    def prefill(self) -> Figures:
        """An uncached prompt, beside the operations at full speed of the matrix units."""
        length = self.sizes.prefix
        times: list[float] = []
        for again in range(4):
            self.add(self.text(length), 1)
            seconds = self.first_tokens()
            self.end()
            times += [seconds] * bool(again)
        spec = self.core.executor.spec
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
        bound_s = (2 * self._body * length + 2 * self._head + attention) / _FLOP_S
        prompt_s = statistics.median(times)
        return {
            "prompt, ms": 1e3 * prompt_s, "tokens/s": length / prompt_s, "bound, ms": 1e3 * bound_s,
            "of the bound, %": 100 * bound_s / prompt_s,
        }  # fmt: skip

    def ttft(self) -> Figures:
        """TTFT of a prefix and a question with nothing cached, and with all but the question cached."""
        cold: list[float] = []
        warm: list[float] = []
        for again in range(4):
            prefix = self.text(self.sizes.prefix)
            for into in (cold, warm):
                self.add(prefix + self.text(self.sizes.question), 1)
                seconds = self.first_tokens()
                into += [seconds] * bool(again)
            self.end()
        cold_s, warm_s = statistics.median(cold), statistics.median(warm)
        ideal_s = cold_s * self.sizes.question / (self.sizes.prefix + self.sizes.question)
        return {
            "cold, ms": 1e3 * cold_s, "warm, ms": 1e3 * warm_s, "ideal share, ms": 1e3 * ideal_s,
            "over ideal": warm_s / ideal_s,
        }  # fmt: skip

    def shared(self, eager: bool) -> Figures:
        """Decoding behind one prefix, which is read once for all (cascade) or by each."""
        with self.without(**({"_graphs": None} if eager else {})):
            cascade_s = self._behind_prefix()
            with self.without(least_saved_tokens=1 << 60):
                plain_s = self._behind_prefix()
        batch = self.sizes.shared_batch
        return {
            "cascade, ms": 1e3 * cascade_s, "plain, ms": 1e3 * plain_s, "plain over cascade": plain_s / cascade_s,
            "tokens/s": batch / cascade_s, "tokens/s, plain": batch / plain_s,
        }  # fmt: skip

    def _behind_prefix(self) -> float:
        prefix = self.text(self.sizes.prefix)
        try:
            self.add(prefix, 1)
            self.first_tokens()
            for _ in range(self.sizes.shared_batch):
                self.add(prefix + self.text(self.sizes.question), self.sizes.steps + 8)
            self.first_tokens()
            for _ in range(3):
                self.step()
            return statistics.median(self.step() for _ in range(self.sizes.steps))
        finally:
            self.end()
