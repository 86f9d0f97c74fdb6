"""The blocks that stores are known to hold, as KV events."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from threading import Lock

from radix.events import Event, Removed
from runtime.kv.tiers.block import Block, BlockKey

# Blocks of a store that are known; the oldest one beyond that counts as gone.
MOST_BLOCKS = 1 << 17


class Ledger:
    """Collects what comes into stores and leaves them, until it is taken; any thread may call it.

    A store may hold more: blocks of earlier processes and of other replicas are known once they were read or written
    here. It may hold less, if others evict from it: a block that is not found there counts as gone.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: defaultdict[str, OrderedDict[BlockKey, Removed]] = defaultdict(OrderedDict)
        self._news: defaultdict[str, list[Event]] = defaultdict(list)

    def stored(self, store: str, block: Block) -> None:
        """Tell of a block, unless it is known there; blocks without an event are not told of."""
        if block.event is None:
            return
        with self._lock:
            held = self._held[store]
            if block.key not in held:
                held[block.key] = Removed(block.event.hashes, block.namespace)
                self._news[store].append(block.event)
                if len(held) > MOST_BLOCKS:
                    self._remove(store, [next(iter(held))])

    def removed(self, store: str, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            self._remove(store, keys)

    def _remove(self, store: str, keys: Iterable[BlockKey]) -> None:
        held = self._held[store]
        for key in keys:
            if (event := held.pop(key, None)) is not None:
                self._news[store].append(event)

    def erased(self, store: str, tenant: str | None) -> None:
        """The blocks of a tenant, or all (None), are gone."""
        with self._lock:
            held = self._held[store]
            self._remove(store, [key for key, event in held.items() if tenant in (None, event.namespace.tenant)])

    def take(self) -> dict[str, list[Event]]:
        """All changes since the last call, by store."""
        with self._lock:
            taken, self._news = self._news, defaultdict(list)
        return taken
