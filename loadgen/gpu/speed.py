"""Speed of a causal model on the GPU, beside what its memory and its matrix units allow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from loadgen.gpu.gaps import profile_gaps
from loadgen.micro.drive import ClockedDrive, matrix_weights
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

# Attributes of the executor, and `overlap` of the engine core, by mode.
_EAGER, _PLAIN = {"_graphs": None}, {"least_saved_tokens": 1 << 60}
MODES: dict[str, dict[str, Any]] = {
    "default": {}, "eager": _EAGER, "one step at a time": {"overlap": False}, "fp8 KV": {},
}  # fmt: skip
SHARED_MODES: dict[str, dict[str, Any]] = {
    "default": {}, "no cascade": _PLAIN, "eager": _EAGER, "eager, no cascade": _EAGER | _PLAIN,
}  # fmt: skip

# Measured on an H200; the part `bounds` shows those of this machine.
_BYTES_S, _FLOP_S = 4.3e12, 780e12


def bounds(device: str) -> dict[str, float]:
    """The machine's memory bandwidth in bytes/s (a copy) and its matrix products in operations/s."""
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
    return {"copy": 2 * size / copied_s, "product": 2 * n**3 / multiplied_s}


class Speed(ClockedDrive):
    """The measurements of one engine with random weights."""

    def __init__(self, path: Path, sizes: Sizes, device: str, **options: Any):
        if device == "cpu":
            options |= {"pool_tokens": 8192, "kernels": "torch"}
        running = max(*sizes.batches, sizes.shared_batch)
        super().__init__(path, device=device, random_weights=True, max_running=running, dtype="bfloat16", **options)
        self._sizes = sizes
        core, spec = self.core, self.core.executor.spec
        self._body, self._head = matrix_weights(spec)
        self._row_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        self._row_bytes *= core.executor.pool.k.dtype.itemsize
        for owner, name, part in (
            (core.scheduler, "schedule", "schedule"), (core.scheduler, "follow", "schedule"),
            (core.planner, "plan", "plan"), (core.executor, "run", "launch"),
            (core.decoding, "choose", "sample"), (core, "_book", "book"),
        ):  # fmt: skip
            self.clock(owner, name, part)

    @contextmanager
    def _changed(self, mode: dict[str, Any]) -> Iterator[None]:
        """A context with other attributes of the executor or the core. Its end aborts the requests."""
        owners = {name: self.core if name == "overlap" else self.core.executor for name in mode}
        before = {name: getattr(owner, name) for name, owner in owners.items()}
        try:
            for name, value in mode.items():
                setattr(owners[name], name, value)
            yield
        finally:
            self.end()
            for name, value in before.items():
                setattr(owners[name], name, value)

    def decode(self, batch: int, mode: dict[str, Any]) -> dict[str, Any]:
        """Steps of requests without a shared prefix, beside the time to read weights and KV; host time by part."""
        steps = self._sizes.steps
        with self._changed(mode):
            for _ in range(batch):
                self.add(self.text(self._sizes.context), 4 * steps + 16)
            self.first_tokens()
            self.pace(3)
            self.reset()
            times = [self.pace(steps) for _ in range(3)]
            host = {part: seconds / (3 * steps) for part, seconds in self.spent.items()}
            gaps = profile_gaps(lambda: self.pace(min(steps, 8)), self.core.executor.device.type)
        weights = (self._body + self._head) * self.core.executor.dtype.itemsize
        bound_s = (weights + batch * self._sizes.context * self._row_bytes) / _BYTES_S
        return {"step": times, "share": bound_s / median(times), "rate": batch / median(times)} | host | gaps

    def shared(self, mode: dict[str, Any]) -> dict[str, Any]:
        """Decode steps of requests behind one prefix."""
        prefix, steps = self.text(self._sizes.prefix), self._sizes.steps
        with self._changed(mode):
            self.add(prefix, 1)
            self.first_tokens()
            for _ in range(self._sizes.shared_batch):
                self.add(prefix + self.text(self._sizes.question), steps + 8)
            self.first_tokens()
            self.pace(3)
            times = [self.step() for _ in range(steps)]
        return {"step": times, "rate": self._sizes.shared_batch / median(times)}

    def first_token(self) -> dict[str, list[float]]:
        """TTFT of a prefix and a question with nothing cached, and with all but the question cached."""
        sizes, cold, warm = self._sizes, list[float](), list[float]()
        for _ in range(4):
            prefix = self.text(sizes.prefix)
            for times in (cold, warm):
                self.add(prefix + self.text(sizes.question), 1)
                times.append(self.first_tokens())
            self.end()
        ideal = sizes.question / (sizes.prefix + sizes.question)
        over = [mine / (full * ideal) for full, mine in zip(cold[1:], warm[1:], strict=True)]
        return {"ttft": cold[1:], "cached": warm[1:], "over": over}

    def prefill(self) -> dict[str, Any]:
        """An uncached prompt, beside the operations at full speed of the matrix units."""
        length, times = self._sizes.prefix, list[float]()
        for _ in range(4):
            self.add(self.text(length), 1)
            times.append(self.first_tokens())
            self.end()
        spec = self.core.executor.spec
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
        bound_s = (2 * self._body * length + 2 * self._head + attention) / _FLOP_S
        prompt_s = median(times[1:])
        return {"ttft": times[1:], "share": bound_s / prompt_s, "rate": length / prompt_s}
