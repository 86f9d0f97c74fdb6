"""BiCache with a LLaDA-8B shape: tokens/s without a cache, with naive reuse, BiCache, Fast-dLLM and both."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from loadgen.gpu.drive import OneAtATime
from loadgen.gpu.figures import Figures, Item
from loadgen.micro.cost_model import modelled_passes
from loadgen.micro.drive import Drive

_INTERVAL = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; `steps`: timed denoising steps of each case, whole intervals of R = 16."""

    shape: str
    prefixes: tuple[int, ...]
    batches: tuple[int, ...]
    output: int
    total_steps: int
    steps: int


FULL = Sizes("llada-8b", (500, 900, 2000), (1, 8), 256, 128, 32)
TINY = Sizes("llada-tiny", (32,), (2,), 64, 64, 16)

_QUESTION = 32


def items(path: Path, device: str, sizes: Sizes) -> Iterator[Item]:
    """Every case for every prefix length and batch."""
    table = Path(__file__).parents[2] / "runtime/reuse/bicache/depth_tables/llada-8b-instruct.json"
    options: dict[str, Any] = {"device": device, "random_weights": True, "dtype": "bfloat16"}
    if sizes is FULL:
        options["depth_table"] = table
    if device == "cpu":
        options |= {"pool_tokens": 8192, "kernels": "torch"}
    with closing(OneAtATime(lambda: _Denoise(path, sizes, options))) as engine:
        for prefix in sizes.prefixes:
            for batch in sizes.batches:
                for name in CASES:
                    case = partial(_Denoise.case, prefix=prefix, batch=batch, name=name)
                    yield f"{prefix} shared, batch {batch}: {name}", partial(engine.call, case)


CASES: dict[str, dict[str, Any]] = {
    "no cache": {"reuse": False},
    "naive": {"depth": -1},
    "d = 0": {"depth": 0},
    "BiCache": {},
    "adaptive depth": {"depth_bound": 0.05},
    "refresh on drift": {"refresh": "drift"},
    "Fast-dLLM": {"reuse": False, "cache": "dual"},
    "both": {"cache": "dual"},
}


class _Denoise(Drive):
    """The measurements of one engine."""

    def __init__(self, path: Path, sizes: Sizes, options: dict[str, Any]):
        super().__init__(path, **options)
        self.sizes = sizes
        self._plain_s: dict[tuple[int, int], float] = {}

    def case(self, prefix: int, batch: int, name: str) -> Figures:
        """Requests with a shared prefix; the first interval is a warm-up, the next ones are timed."""
        sizes, layers = self.sizes, self.core.executor.spec.num_layers
        params = dict(CASES[name])
        if params.get("depth") == -1:
            params["depth"] = layers
        # Fast-dLLM caches within blocks; the others decide over the whole canvas, as in the paper.
        block = 32 if params.get("cache") else sizes.output
        shared = self.text(prefix)
        try:
            for _ in range(batch):
                self.add(
                    shared + self.text(_QUESTION), sizes.output, steps=sizes.total_steps, block_length=block,
                    prefix_tokens=prefix, refresh_interval=_INTERVAL, **params,
                )  # fmt: skip
            for _ in range(_INTERVAL + 1):
                self.step()
            times = [self.step() for _ in range(sizes.steps)]
            depth = next(iter(self.core.requests.values())).reuse.depth if self.core.requests else 0
        finally:
            self.end()
        step_s = statistics.mean(times)
        tokens_s = batch * sizes.output / sizes.total_steps / step_s
        if name == "no cache":
            self._plain_s[prefix, batch] = step_s
        plain_s = self._plain_s.get((prefix, batch))
        ratio = prefix / (prefix + _QUESTION + sizes.output)
        return {
            "step, ms": 1e3 * step_s, "tokens/s": tokens_s, "depth": depth,
            "gain, %": 100 * (plain_s / step_s - 1) if plain_s else "?",
            "gain by rows, %": 100 * (1 / _cost(name, ratio, depth / layers) - 1) if name in _COUNTED else "?",
        }  # fmt: skip


_COUNTED = ("no cache", "naive", "d = 0", "BiCache")


def _cost(name: str, ratio: float, depth: float) -> float:
    """A step's share of a pass, by the cost model; `ratio`: share of shared rows, `depth`: share of reused layers."""
    if name == "no cache":
        return 1.0
    if name == "naive":
        return 1 - ratio
    return modelled_passes(1 / _INTERVAL, 1 - 1 / _INTERVAL, ratio, depth)
