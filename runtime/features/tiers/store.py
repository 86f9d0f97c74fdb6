"""The interface of a store of blocks, and the order in which a bounded store evicts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from runtime.features.tiers.block import BlockKey, Buffer


class Usage(NamedTuple):
    """Contents of a store; `capacity` is in bytes, None: the store has no bound of its own."""

    bytes: int
    blocks: int
    capacity: int | None


class StoredBlock(NamedTuple):
    """A stored block; `used`: its last use or its writing, in seconds since the epoch."""

    key: BlockKey
    tenant: str
    size: int
    used: float = 0.0


class BlockStore(Protocol):
    """Keeps blocks by key; any thread may call it.

    Stores do not validate blocks; readers do. If the device or the server fails, methods raise OSError, which
    `Tier` turns into misses.

    Attributes:
        name: `host`, `disk` or `store`.
        outlives: whether blocks survive the process; then they are encrypted.
        on_evict: called with the keys of blocks that the store evicts.
    """

    name: str
    outlives: bool
    on_evict: Callable[[Iterable[BlockKey]], None]

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def get(self, key: BlockKey) -> Buffer | None: ...

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str) -> bool:
        """Store a block, or replace it; False if it is too large."""

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Mark blocks as used now; missing blocks are ignored."""

    def delete(self, keys: Iterable[BlockKey]) -> None: ...

    def erase(self, tenant: str | None) -> int:
        """Delete the blocks of a tenant, or of all (None); returns their number."""

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


class Contents:
    """The blocks of a bounded store, from the least to the most recently used.

    Args:
        capacity: most bytes of all blocks.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_bytes = 0
        self._entries: OrderedDict[BlockKey, StoredBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def add(self, entry: StoredBlock) -> None:
        """Add a block as the most recently used one, or replace it."""
        self.remove(entry.key)
        self._entries[entry.key] = entry
        self.num_bytes += entry.size

    def use(self, key: BlockKey, used: float = 0.0) -> None:
        """Make a block the most recently used one, if it is there."""
        if (entry := self._entries.get(key)) is not None:
            self._entries[key] = entry._replace(used=used)
            self._entries.move_to_end(key)

    def remove(self, key: BlockKey) -> bool:
        """Remove a block; returns whether it was there."""
        if (entry := self._entries.pop(key, None)) is None:
            return False
        self.num_bytes -= entry.size
        return True

    def victim(self, size: int) -> StoredBlock | None:
        """The next block to evict to make room for `size` bytes; None if they fit. `size` is at most the capacity."""
        return next(iter(self._entries.values())) if self.num_bytes + size > self.capacity else None

    def of(self, tenant: str | None) -> list[BlockKey]:
        """Keys of the blocks of a tenant, or of all (None)."""
        return [key for key, entry in self._entries.items() if tenant in (None, entry.tenant)]


def size_of(buffers: Sequence[Buffer]) -> int:
    """Number of bytes of all buffers."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def joined(buffers: Sequence[Buffer]) -> Buffer:
    """The bytes of all buffers; a single read-only buffer is not copied."""
    return buffers[0] if len(buffers) == 1 and memoryview(buffers[0]).readonly else b"".join(buffers)
