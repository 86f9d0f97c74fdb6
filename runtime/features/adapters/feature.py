"""The door of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ModelError
from runtime.features.feature import Feature

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.engine.core import EngineCore
    from runtime.features.adapters.part import EngineAdapters


class AdaptersFeature(Feature):
    """Low-rank adapters, which operators load and requests name as models."""

    def __init__(self, config: Config, path: Path):
        if not config.model.adapters:
            return
        from runtime.models.adapters.lora import read_lora

        for name, directory in config.model.adapters:
            try:
                read_lora(Path(directory))
            except ModelError as error:
                raise ModelError(f"--lora {name}={directory}: {error.message}") from None

    def parts(self, core: EngineCore) -> Iterable[EngineAdapters]:
        from runtime.features.adapters.part import EngineAdapters

        yield EngineAdapters(core.executor, core.requests)
