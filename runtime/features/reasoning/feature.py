"""The door of ReasonCache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from runtime.errors import ModelError
from runtime.features.feature import Feature, Opening
from runtime.features.reasoning.ask import METHOD

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.features.reasoning.strategy import ReasonCache


class ReasoningFeature(Feature):
    """Pages of reasoning steps that repeat within an output are shared."""

    method = METHOD
    counters: ClassVar[Mapping[str, tuple[str, str]]] = {
        "substituted_pages": ("ramet:substituted_pages", "Pages of reasoning steps replaced by pages of similar steps"),
        "deferred_evaluations": (
            "ramet:reasoning_deferred",
            "Comparisons of reasoning steps deferred for lack of CPU time",
        ),
        "reasoning_seconds": ("ramet:reasoning_cpu_seconds", "CPU seconds spent comparing reasoning steps"),
    }
    gauges: ClassVar[Mapping[str, tuple[str, str]]] = {
        "saved_pages": ("ramet:saved_pages", "Pages that live requests save by sharing reasoning steps")
    }

    def __init__(self, config: Config, path: Path):
        if config.cache.reuse == METHOD and config.model.tensor_parallel > 1:
            raise ModelError(f"--reuse {METHOD} is not served by several ranks")

    def serves(self, opening: Opening) -> bool:
        return opening.reads_anywhere and opening.executor.decoder.code == "ramet"

    def strategy(self, opening: Opening) -> ReasonCache:
        from runtime.features.reasoning.strategy import ReasonCache
        from runtime.models.tokenizer import Tokenizer

        return ReasonCache(opening.cache, opening.executor, lambda: Tokenizer.load(opening.path))
