"""The door of a feature. The server's process imports it, so nothing here needs torch before an engine is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.execution.executor import Executor
    from runtime.kv.cache import PagedCache
    from runtime.protocol import ModelInfo
    from runtime.request import Strategy


@dataclass(frozen=True, slots=True)
class Opening:
    """An engine that is being opened: all that its strategies are made of. `path`: the model's directory."""

    config: Config
    path: Path
    executor: Executor
    cache: PagedCache
    info: ModelInfo


class Feature:
    """A way of reuse for causal models.

    Attributes:
        method: the name of its strategy, which is the tag of its ask.
        counters, gauges: fields of the engine's state, with the names and the help of their metrics.
    """

    method: ClassVar[str]
    counters: ClassVar[Mapping[str, tuple[str, str]]] = {}
    gauges: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def check(self, config: Config) -> None:
        """Raise ModelError for options that exclude this feature."""

    def serves(self, opening: Opening) -> bool:
        """Whether the engine's model can be served in this way."""
        raise NotImplementedError

    def strategy(self, opening: Opening) -> Strategy:
        """The strategy, opened at the first request that asks for it."""
        raise NotImplementedError
