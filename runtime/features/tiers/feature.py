"""The door of tiers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import ModelError
from runtime.features.feature import Feature

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.engine.core import EngineCore
    from runtime.features.tiers.tiering import Tiering


class TiersFeature(Feature):
    """KV that outlives the pool, in host memory, on a disk or in a store that replicas share."""

    def __init__(self, config: Config, path: Path):
        self._path, self._opened = path, None
        if not config.tiers.any:
            return
        if not config.cache.prefix_cache:
            raise ModelError("--no-prefix-cache leaves nothing for --host-memory, --disk-cache and --kv-store")
        from runtime.features.tiers.tiering import open_tiers

        self._opened = open_tiers(config.tiers)

    def parts(self, core: EngineCore) -> Iterable[Tiering]:
        if self._opened is None:
            return
        from runtime.features.tiers.tiering import Tiering

        yield Tiering(core, self._path, *self._opened)
