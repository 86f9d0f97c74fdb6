"""Blocks in the memory of the host."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock
from typing import NamedTuple

from runtime.kv.tiers.block import BlockKey, Buffer
from runtime.kv.tiers.store import Entry, Limits, Usage, joined


class _Held(NamedTuple):
    data: Buffer
    entry: Entry


class HostStore:
    """The most recently used blocks.

    A block is one object that nobody changes, so that a reader needs no copy, and eviction takes nothing from it.
    """

    name = "host"
    outlives = False

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.time):
        self.on_evict: Callable[[Iterable[BlockKey]], None] = lambda keys: None
        self._limits = limits
        self._clock = clock
        self._lock = Lock()
        self._bytes = Counter[str]()  # by tenant
        self._total = 0
        # By tenant, each from the least to the most recently used.
        self._blocks: dict[str, OrderedDict[BlockKey, _Held]] = {}
        self._tenants: OrderedDict[BlockKey, str] = OrderedDict()  # all blocks, in the same order

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [key in self._tenants for key in keys]

    def get(self, key: BlockKey) -> Buffer | None:
        with self._lock:
            return self._use(key, hits=1)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._use(key, hits=0)

    def _use(self, key: BlockKey, hits: int) -> Buffer | None:
        if (tenant := self._tenants.get(key)) is None:
            return None
        blocks = self._blocks[tenant]
        data, entry = blocks[key]
        blocks[key] = _Held(data, entry._replace(used=self._clock(), hits=entry.hits + hits))
        blocks.move_to_end(key)
        self._tenants.move_to_end(key)
        return data

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str, reason: str) -> bool:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        quota = self._limits.of(tenant)
        if size > quota:
            return False
        data = joined(buffers)
        with self._lock:
            self._drop(key)
            while self._bytes[tenant] + size > quota:
                self._evict(next(iter(self._blocks[tenant])))
            while self._total + size > self._limits.capacity:
                self._evict(next(iter(self._tenants)))
            self._tenants[key] = tenant
            entry = Entry(key, tenant, size, self._clock(), 0, reason)
            self._blocks.setdefault(tenant, OrderedDict())[key] = _Held(data, entry)
            self._bytes[tenant] += size
            self._total += size
        return True

    def _evict(self, key: BlockKey) -> None:
        self._drop(key)
        self.on_evict([key])

    def _drop(self, key: BlockKey) -> bool:
        if (tenant := self._tenants.pop(key, None)) is None:
            return False
        size = self._blocks[tenant].pop(key).entry.size
        self._total -= size
        self._bytes[tenant] -= size
        if not self._blocks[tenant]:
            del self._blocks[tenant], self._bytes[tenant]
        return True

    def delete(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def erase(self, tenant: str | None) -> int:
        with self._lock:
            keys = list(self._tenants if tenant is None else self._blocks.get(tenant, ()))
            return sum(self._drop(key) for key in keys)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._total, len(self._tenants), self._limits.capacity)

    def entries(self) -> Iterator[Entry]:
        with self._lock:
            held = [self._blocks[tenant][key].entry for key, tenant in self._tenants.items()]
        yield from held

    def close(self) -> None:
        self.erase(None)
