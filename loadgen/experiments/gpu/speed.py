"""Speed of a causal model on the GPU, beside what its memory and its matrix units allow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from loadgen.experiments.gpu.gaps import profile_gaps
from loadgen.experiments.gpu.watched import WatchedDrive
from loadgen.experiments.micro.timing import timed
from loadgen.offline.drive import matrix_weights


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
TINY = Sizes("llama-tiny", 32, 256, 8, (1, 3), (64, 256), 3, 3)

# By mode, attributes of the decoder, `overlap` of the engine core and `least_saved_tokens` of the planner.
_EAGER, _PLAIN = {"graphs": None}, {"least_saved_tokens": 1 << 60}
MODES: dict[str, dict[str, Any]] = {
    "default": {}, "eager": _EAGER, "one step at a time": {"overlap": False}, "fp8 KV": {},
}  # fmt: skip
SHARED_MODES: dict[str, dict[str, Any]] = {
    "default": {}, "no cascade": _PLAIN, "eager": _EAGER, "eager, no cascade": _EAGER | _PLAIN,
}  # fmt: skip
# FlashInfer's kernels for prompts; the second needs a Hopper GPU.
PREFILLS = ("fa2", "fa3")


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


def use_prefill(executor: Any, kernels: str) -> None:
    """Let FlashInfer compute prompts with other kernels of its own."""
    attention = executor.decoder.forward.keywords["backend"]
    make = attention._flashinfer.BatchPrefillWithPagedKVCacheWrapper
    attention.make_prefill = lambda: make(attention.workspace, kv_layout="NHD", backend=kernels)
    attention._wrappers["prefill"].clear()


def share_of(bound_s: float, seconds: float) -> float:
    """The share of a bound that was reached. Raises RuntimeError above 1: something else was measured."""
    if bound_s > seconds:
        raise RuntimeError(f"{seconds:.6f} s, which is {bound_s / seconds:.0%} of what the device allows")
    return bound_s / seconds


class Speed(WatchedDrive):
    """The measurements of one engine with random weights."""

    def __init__(self, path: Path, sizes: Sizes, device: str, **options: Any):
        most = bounds(device)  # while there is room on the device
        self._bytes_s, self._flop_s = most["copy"], most["product"]
        if device == "cuda":
            torch.cuda.empty_cache()
        if device == "cpu":
            options |= {"pool_tokens": 8192, "kernels": "torch"}
        running = max(*sizes.batches, sizes.shared_batch)
        super().__init__(path, device=device, random_weights=True, max_running=running, dtype="bfloat16", **options)
        self.demand_backend()
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
        """A context with other attributes. Its end aborts the requests."""
        elsewhere: dict[str, object] = {"overlap": self.core, "least_saved_tokens": self.core.planner}
        owners = {name: elsewhere.get(name, self.core.executor.decoder) for name in mode}
        before = {name: getattr(owner, name) for name, owner in owners.items()}
        try:
            for name, value in mode.items():
                setattr(owners[name], name, value)
            yield
        finally:
            self.end()
            for name, value in before.items():
                setattr(owners[name], name, value)

    def _check_graphs(self, mode: dict[str, Any]) -> None:
        """Raise RuntimeError if a GPU's steps ran with graphs or without, against the mode."""
        if self.core.executor.device.type != "cpu":
            self.demand("graphs", "graphs" not in mode)

    def decode(self, batch: int, mode: dict[str, Any]) -> dict[str, Any]:
        """Steps of requests without a shared prefix, beside the time to read weights and KV; host time by part."""
        steps = self._sizes.steps
        with self._changed(mode):
            for _ in range(batch):
                self.add(self.text(self._sizes.context), 4 * steps + 16)
            self.first_tokens()
            self.pace(3)
            self.reset()
            self.forget()
            times = [self.pace(steps) for _ in range(3)]
            self._check_graphs(mode)
            ran = self.share("graphs")
            host = {part: seconds / (3 * steps) for part, seconds in self.spent.items()}
            gaps = profile_gaps(lambda: self.pace(min(steps, 8)), self.core.executor.device.type)
        weights = (self._body + self._head) * self.core.executor.dtype.itemsize
        bound_s = (weights + batch * self._sizes.context * self._row_bytes) / self._bytes_s
        rate = batch / median(times)
        return {"step": times, "share": share_of(bound_s, median(times)), "rate": rate, "graphs": ran} | host | gaps

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
            self.forget()
            times = [self.step() for _ in range(steps)]
            self.demand("sharing", "least_saved_tokens" not in mode)
            ran = {kind: self.share(kind) for kind in ("graphs", "sharing")}
        return {"step": times, "rate": self._sizes.shared_batch / median(times)} | ran

    def first_token(self) -> dict[str, Any]:
        """TTFT of a prefix and a question with nothing cached, and with all but the question cached.

        `graphs`: the share of the steps with a cached prefix that ran as a CUDA graph.
        """
        sizes, cold, warm = self._sizes, list[float](), list[float]()
        graphs = list[float]()
        for _ in range(4):
            prefix = self.text(sizes.prefix)
            for times in (cold, warm):
                self.add(prefix + self.text(sizes.question), 1)
                self.forget()
                times.append(self.first_tokens())
            graphs.append(self.share("prompt graphs"))
            self.end()
        ideal = sizes.question / (sizes.prefix + sizes.question)
        over = [mine / (full * ideal) for full, mine in zip(cold[1:], warm[1:], strict=True)]
        return {"ttft": cold[1:], "cached": warm[1:], "over": over, "graphs": mean(graphs[1:])}

    def prefill(self, kernels: str) -> dict[str, Any]:
        """An uncached prompt, beside the operations at full speed of the matrix units.

        `kernels`: of `PREFILLS`.
        """
        if self.core.info.attention_backend == "flashinfer":
            use_prefill(self.core.executor, kernels)
        length, times = self._sizes.prefix, list[float]()
        for _ in range(4):
            self.add(self.text(length), 1)
            times.append(self.first_tokens())
            self.end()
        spec = self.core.executor.spec
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
        bound_s = (2 * self._body * length + 2 * self._head + attention) / self._flop_s
        prompt_s = median(times[1:])
        return {"ttft": times[1:], "share": share_of(bound_s, prompt_s), "rate": length / prompt_s}
