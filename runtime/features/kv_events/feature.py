"""The door of KV events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runtime.features.feature import Feature

if TYPE_CHECKING:
    from runtime.engine.core import EngineCore
    from runtime.features.kv_events.part import KVEvents


class KVEventsFeature(Feature):
    """Events of KV that enters or leaves the cache and its tiers, for routers and other consumers."""

    def parts(self, core: EngineCore) -> Iterable[KVEvents]:
        if core.cache.events is None:
            return
        from runtime.features.kv_events.part import KVEvents

        yield KVEvents(core, core.cache.events)
