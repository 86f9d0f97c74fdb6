"""An engine core in this process, driven step by step."""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from loadgen.harness import BenchError
from radix import Namespace
from runtime.asks import ReuseAsk
from runtime.calls import AnyCall, EngineCall, FlushCache
from runtime.config import make_config
from runtime.engine.core import EngineCore
from runtime.features.diffusion.ask import DiffusionParams
from runtime.models.spec import DecoderSpec, ModelSpec
from runtime.opening import open_engine
from runtime.params import SamplingParams
from runtime.protocol import AddRequest, CallEngine, TokenEvent

A = TypeVar("A")


def whole(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """The events. Raises BenchError if a request failed: a bench would take the missing work for speed."""
    found = [*events]
    for event in found:
        if (end := event.finish) is not None and end.type in ("abort", "error"):
            raise BenchError(f"request {event.rid} failed ({end.type}): {end.message}")
    return found


def answer(core: EngineCore, call: EngineCall[A]) -> A:
    """The answer to an operator's call, after as many steps as it takes. Raises RametError."""
    core.handle(CallEngine(0, cast(AnyCall, call)))
    while not (replies := core.settle()):
        whole(core.step())
    return replies[0].read(call)


class Drive:
    """Adds greedy requests, times steps, collects tokens. Raises BenchError if a request fails.

    Args:
        path: the model's directory.
        seed: of its texts.
        options: options as of `ramet serve`. Drafts are off by default, so that a step gives each request one token.
    """

    def __init__(self, path: Path, seed: int = 0, **options: Any):
        options = {"model": str(path), "drafts": "off"} | options
        self.core = open_engine(make_config(**options), path)
        self._draw, self._count = random.Random(seed), 0

    def reseed(self, draw: random.Random) -> None:
        """Draw all further texts from `draw`."""
        self._draw = draw

    def text(self, length: int) -> array[int]:
        """Random tokens, none of them special."""
        return array("i", self._draw.choices(range(3, min(self.core.info.vocab_size, 290)), k=length))

    def add(
        self,
        prompt: array[int],
        output: int,
        ask: ReuseAsk | None = None,
        sampling: dict[str, Any] | None = None,
        namespace: Namespace = Namespace(),
        **diffusion: Any,
    ) -> None:
        """Add a request, greedy unless `sampling`, which may have the field `logprobs`, says otherwise.

        `ask`: of a strategy; `diffusion`: fields for a diffusion model.
        """
        self._count += 1
        given = {"temperature": 0, "ignore_eos": True, "max_new_tokens": output} | (sampling or {})
        logprobs = given.pop("logprobs", None)
        params = SamplingParams(**given)
        denoising = None
        if (model := self.core.info.decoding) is not None:
            denoising = DiffusionParams(gen_length=output, **diffusion).filled(model, params)
        message = AddRequest(
            f"{self._count}",
            prompt.tobytes(),
            params,
            decoding=denoising,
            ask=ask,
            namespace=namespace,
            logprobs=logprobs,
        )
        whole(self.core.handle(message))

    def events(self) -> list[TokenEvent]:
        """The events of one step."""
        return whole(self.core.step())

    def step(self) -> float:
        """Seconds of one step, device included."""
        return self.pace(1)

    def pace(self, steps: int) -> float:
        """Mean seconds of consecutive steps, with a wait for the device only before and after all of them."""
        self._wait()
        started = time.perf_counter()
        for _ in range(steps):
            self.events()
        self._wait()
        return (time.perf_counter() - started) / steps

    def first_tokens(self) -> float:
        """Seconds until all requests have their first token."""
        started = time.perf_counter()
        while any(not request.num_output for request in self.core.requests.values()):
            self.step()
        return time.perf_counter() - started

    def finish(self) -> list[float]:
        """Decode to the end; seconds of each step after which all requests still run."""
        running, times = len(self.core.requests), []
        while self.core.busy:
            seconds = self.step()
            if len(self.core.requests) == running:
                times.append(seconds)
        return times

    def tokens(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Greedy tokens of several prompts that run together."""
        found: dict[str, list[int]] = {}
        for prompt in prompts:
            self.add(array("i", prompt), output)
            found[f"{self._count}"] = []
        while self.core.busy:
            for event in self.events():
                found[event.rid] += event.tokens
        return list(found.values())

    def abort_all(self) -> None:
        """Abort the open requests."""
        for rid in list(self.core.requests):
            self.core.abort(rid)

    def end(self) -> None:
        """Abort the open requests and flush the cache."""
        self.abort_all()
        answer(self.core, FlushCache())

    def _wait(self) -> None:
        if self.core.executor.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free the memory."""
        self.core.close()
        del self.core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ClockedDrive(Drive):
    """A drive that measures the time of its parts.

    Attributes:
        spent: by part, the host's seconds since `reset`, without the time of nested parts.
    """

    def __init__(self, path: Path, **options: Any):
        super().__init__(path, **options)
        self._replaced: list[tuple[object, str, object]] = []
        self.reset()

    def reset(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._within = [0.0]

    def clock(self, owner: object, name: str, part: str) -> None:
        """Count the calls of a method for a part."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._within.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                self.spent[part] += seconds - self._within.pop()
                self._within[-1] += seconds

        self.replace(owner, name, timed)

    def replace(self, owner: object, name: str, call: Callable[..., Any]) -> None:
        """Replace a method until `close`."""
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, call)

    def close(self) -> None:
        # The kernels' library outlives the engine. Nothing here may keep the engine when the memory is freed.
        while self._replaced:
            setattr(*self._replaced.pop())
        super().close()


def matrix_weights(spec: ModelSpec) -> tuple[int, int]:
    """Weights in the matrices of all layers, and in the output head, of a model in Ramet's own code."""
    assert isinstance(spec, DecoderSpec)
    layer = 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    layer += 3 * spec.hidden_size * spec.intermediate_size
    return layer * spec.num_layers, spec.vocab_size * spec.hidden_size
