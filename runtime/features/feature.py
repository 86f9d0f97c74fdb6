"""The door of a feature. The server's process imports it, so nothing here needs torch before an engine is opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.engine.core import EngineCore
    from runtime.engine.part import Part
    from runtime.execution.executor import Executor
    from runtime.frontend.preparer import Preparer, ServedModel
    from runtime.kv.cache import PagedCache
    from runtime.protocol import ModelInfo
    from runtime.request import AnyStrategy, Decoding, Strategy


@dataclass(frozen=True, slots=True)
class Opening:
    """An engine that is being opened: all that its strategies are made of. `path`: the model's directory."""

    config: Config
    path: Path
    executor: Executor
    cache: PagedCache
    info: ModelInfo

    @property
    def reads_anywhere(self) -> bool:
        """Whether requests may read KV at positions that are not consecutive, which windows and states forbid."""
        executor = self.executor
        return executor.spec.causal and not executor.has_windows and executor.states is None


class Feature:
    """What a feature adds to an engine. Each hook is for some features; the others leave it out.

    An engine opens all features before it loads the model, so that a bad option fails at once.

    Attributes:
        method: the strategy that requests may ask for: its name, which is the tag of its ask; None: there is none.
        counters, gauges: fields of the engine's state, with the names and the help of their metrics.
    """

    method: ClassVar[str | None] = None
    counters: ClassVar[Mapping[str, tuple[str, str]]] = {}
    gauges: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, config: Config, path: Path):
        """`path`: the model's directory. Raises ModelError for options that cannot be served."""

    def default(self, opening: Opening) -> Strategy[None] | None:
        """The strategy of requests that ask for none, if the model needs another one than prefix caching."""
        return None

    def decoding(self, opening: Opening) -> Decoding | None:
        """The decoding, if the model does not choose next tokens."""
        return None

    def serves(self, opening: Opening) -> bool:
        """Whether requests may ask for `method`."""
        return False

    def strategy(self, opening: Opening) -> AnyStrategy:
        """The strategy `method`, opened at the first request that asks for it."""
        raise NotImplementedError

    def parts(self, core: EngineCore) -> Iterable[Part]:
        """The feature's parts of an engine."""
        return ()

    @staticmethod
    def preparer(served: ServedModel) -> Preparer | None:
        """What the feature does to submissions, in the server's process. Raises ModelError."""
        return None
