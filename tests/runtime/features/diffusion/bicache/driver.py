"""Drives a EngineCore step by step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radix import Namespace
from runtime.config import make_config
from runtime.engine.core import EngineCore
from runtime.features.diffusion.ask import DiffusionParams
from runtime.opening import open_engine
from runtime.params import SamplingParams
from tests.runtime.engine.driver import Driver


def make_core(path: Path, **options: Any) -> EngineCore:
    """A core in float32 that checks its invariants after every step."""
    options = {"dtype": "float32", "device": "cpu", "pool_tokens": 2048, "debug_invariants": True, **options}
    return open_engine(make_config(model=str(path), **options), path)


class DenoiseDriver(Driver):
    """Runs requests on a diffusion core and keeps what they gave."""

    core: EngineCore

    def denoise(
        self,
        rid: str,
        prompt: Sequence[int],
        sampling: dict[str, Any] | None = None,
        namespace: Namespace = Namespace(),
        store: bool = True,
        **diffusion: Any,
    ) -> None:
        """Add a request; `diffusion` are fields of `DiffusionParams`."""
        given = {"temperature": 0, "ignore_eos": True} | (sampling or {})
        params = SamplingParams(**given)
        filled = DiffusionParams(**diffusion).filled(self.core.info.decoding, params)
        filled.check(self.core.info.decoding, params, self.core.executor.spec.num_layers, len(prompt))
        self.send(rid, prompt, sampling or {}, namespace=namespace, store=store, decoding=filled)

    def one(self, prompt: Sequence[int], **options: Any) -> list[int]:
        """Run one request alone; its tokens."""
        rid = f"one{len(self.tokens)}"
        self.denoise(rid, prompt, **options)
        self.run()
        return self.tokens[rid]

    def report(self, rid: str) -> dict[str, Any]:
        """`reuse` and `cached_tokens` of a request's last event."""
        last = self.events[rid][-1]
        return {**last.reuse.fields(), "cached_tokens": self.cached(rid)}

    def last(self) -> str:
        """The request that was added last."""
        return list(self.tokens)[-1]
