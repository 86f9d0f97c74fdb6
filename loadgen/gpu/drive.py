"""An engine core that is driven step by step on the device that is measured."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore


class Drive:
    """Requests in, steps timed, tokens out.

    Attributes:
        host_s: seconds that the host spent on something since `watch`, by its name.
    """

    def __init__(self, path: Path, **options: Any):
        """`options`: as of `ramet serve`."""
        from runtime.engine.cores import open_core

        from runtime.config import make_config

        self.core: EngineCore = open_core(make_config(model=str(path), **options), path)
        self._draw, self._count = random.Random(0), 0
        self.host_s: dict[str, float] = {}

    def text(self, length: int) -> array[int]:
        """Tokens at random, but for the special ones."""
        return array("i", self._draw.choices(range(3, min(self.core.info.vocab_size, 290)), k=length))

    def add(self, prompt: array[int], output: int, **diffusion: Any) -> None:
        """A greedy request; `diffusion`: how a diffusion model denoises it."""
        from runtime.params import DiffusionParams, SamplingParams
        from runtime.protocol import AddRequest

        self._count += 1
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=output)
        params = None
        if self.core.info.diffusion is not None:
            algorithm = self.core.info.diffusion.algorithm
            params = DiffusionParams(gen_length=output, **diffusion).filled(algorithm, sampling)
        message = AddRequest(
            f"{self._count}", prompt.tobytes(), sampling.model_dump(),
            diffusion=None if params is None else params.model_dump(),
        )  # fmt: skip
        self.core.handle(message)

    def step(self) -> float:
        """Seconds of one step, device included."""
        self._wait()
        started = time.perf_counter()
        self.core.step()
        self._wait()
        return time.perf_counter() - started

    def pace(self, steps: int) -> float:
        """Seconds of a step, device included, of several in a row, between which only the engine waits for it."""
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.core.step()
        self._wait()
        return (time.perf_counter() - started) / steps

    def first_tokens(self) -> float:
        """Seconds until all requests have their first token."""
        started = time.perf_counter()
        while any(not request.num_output for request in self.core.requests.values()):
            self.step()
        return time.perf_counter() - started

    def tokens(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Greedy tokens of several prompts that run together."""
        found: dict[str, list[int]] = {}
        for prompt in prompts:
            self.add(array("i", prompt), output)
            found[f"{self._count}"] = []
        while self.core.busy:
            for event in self.core.step():
                found[event.rid] += event.tokens
        return list(found.values())

    def end(self) -> None:
        """Abort what is open and forget what is cached."""
        for rid in list(self.core.requests):
            self.core.abort(rid)
        self.core.admin.flush()

    @contextmanager
    def without(self, **attributes: Any) -> Iterator[None]:
        """The executor with other attributes for a while."""
        executor = self.core.executor
        kept = {name: getattr(executor, name) for name in attributes}
        try:
            for name, value in attributes.items():
                setattr(executor, name, value)
            yield
        finally:
            for name, value in kept.items():
                setattr(executor, name, value)

    def watch(self) -> None:
        """From now on, count the host's seconds in scheduling, planning, launching, choosing and booking."""
        core = self.core
        for where, name, shown in (
            (core.scheduler, "schedule", "schedule"), (core.scheduler, "follow", "schedule"), (core, "_plan", "plan"),
            (core.executor, "run", "launch"), (core, "_choose", "sample"), (core, "_book", "book"),
        ):  # fmt: skip
            if hasattr(where, name) and not hasattr(getattr(where, name), "watched"):
                setattr(where, name, self._timed(getattr(where, name), shown))
        self.host_s = {}

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.host_s[name] = self.host_s.get(name, 0.0) + time.perf_counter() - started

        timed.watched = True  # type: ignore[attr-defined]
        return timed

    def _wait(self) -> None:
        if self.core.executor.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.core.close()
        del self.core
        import gc

        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
