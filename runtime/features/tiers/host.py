"""A store of blocks in main memory."""

from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from runtime.features.tiers.block import BlockKey, Buffer
from runtime.features.tiers.store import Contents, StoredBlock, Usage, joined, size_of


class HostStore:
    """Keeps the most recently used blocks.

    A block is one immutable object, so readers need no copy, and an evicted block stays valid for its readers.
    """

    name = "host"
    outlives = False

    def __init__(self, capacity: int):
        """`capacity`: largest number of bytes of all blocks."""
        self.on_evict: Callable[[Iterable[BlockKey]], None] = lambda keys: None
        self._contents = Contents(capacity)
        self._blocks: dict[BlockKey, Buffer] = {}
        self._lock = Lock()

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        with self._lock:
            return [key in self._blocks for key in keys]

    def get(self, key: BlockKey) -> Buffer | None:
        with self._lock:
            self._contents.use(key)
            return self._blocks.get(key)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._contents.use(key)

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str) -> bool:
        size = size_of(buffers)
        if size > self._contents.capacity:
            return False
        block = joined(buffers)
        with self._lock:
            self._remove(key)
            while (victim := self._contents.victim(size)) is not None:
                self._remove(victim.key)
                self.on_evict([victim.key])
            self._contents.add(StoredBlock(key, tenant, size))
            self._blocks[key] = block
        return True

    def _remove(self, key: BlockKey) -> None:
        self._contents.remove(key)
        self._blocks.pop(key, None)

    def delete(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

    def erase(self, tenant: str | None) -> int:
        with self._lock:
            keys = self._contents.of(tenant)
            for key in keys:
                self._remove(key)
        return len(keys)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._contents.num_bytes, len(self._contents), self._contents.capacity)

    def close(self) -> None:
        self.erase(None)
