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
    from runtime.features.tiers.crypt import KeyFile
    from runtime.features.tiers.store import BlockStore
    from runtime.features.tiers.tiering import Tiering


class TiersFeature(Feature):
    """KV that outlives the pool, in host memory, on a disk or in a store that replicas share."""

    def __init__(self, config: Config, path: Path):
        self._cipher: KeyFile | None = None
        self._stores: list[BlockStore] = []
        if not config.tiers.any and config.tiers.kv_encryption_key_file is None:
            return
        if config.tiers.any and not config.cache.prefix_cache:
            raise ModelError("--no-prefix-cache leaves nothing for --host-memory, --disk-cache and --kv-store")
        from runtime.features.tiers.tiering import open_tiers

        self._cipher, self._stores = open_tiers(config.tiers)

    def parts(self, core: EngineCore) -> Iterable[Tiering]:
        if not self._stores:
            return
        from runtime.features.tiers.tiering import Tiering

        yield Tiering(core, self._cipher, self._stores)
