"""Tiers as the options ask for them."""

from __future__ import annotations

from runtime.config import TierConfig
from runtime.kv.cache import PagedCache
from runtime.kv.tiers.block import Fingerprint, Format
from runtime.kv.tiers.host import HostStore
from runtime.kv.tiers.store import BlockStore, Limits
from runtime.kv.tiers.tiers import Tiers
from runtime.kv.tiers.worker import TierWorker

_GIB = 1 << 30


def open_tiers(config: TierConfig, cache: PagedCache, fingerprint: Fingerprint) -> Tiers:
    """Raises ModelError if a store cannot be used."""
    stores: list[BlockStore] = []
    if config.host_memory is not None:
        stores.append(HostStore(Limits(int(config.host_memory * _GIB))))
    return Tiers(cache, TierWorker(Format(fingerprint.digest()), stores))
