"""The door of a store of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from runtime.kv.tiers.block import BlockKey, Buffer


class Usage(NamedTuple):
    """Contents of a store; `capacity` is in bytes, None: nobody bounds it here."""

    bytes: int
    blocks: int
    capacity: int | None


class Entry(NamedTuple):
    """A block in a store, as far as the store knows it.

    Attributes:
        used: seconds since the epoch; of its last use, or of its writing.
        reason: the word with which it was put.
    """

    key: BlockKey
    tenant: str
    size: int
    used: float
    hits: int
    reason: str


class BlockStore(Protocol):
    """Keeps blocks by key; any thread may call it.

    A store believes nothing and checks nothing: whoever reads decodes. Where the device or the peer fails, methods
    raise OSError; `GuardedStore` turns that into misses.

    Attributes:
        name: `host`, `disk` or `store`.
        outlives: whether blocks are still there after the process has ended. They are encrypted then.
    """

    name: str
    outlives: bool

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    def get(self, key: BlockKey) -> Buffer | None: ...

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str, reason: str) -> bool:
        """Keep a block, in place of an earlier one; False if there is no room for it."""

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Blocks that are there are used now."""

    def delete(self, keys: Iterable[BlockKey]) -> None: ...

    def erase(self, tenant: str | None) -> int:
        """Delete the blocks of a tenant, or of all (None); returns their number."""

    def usage(self) -> Usage: ...

    def entries(self) -> Iterator[Entry]: ...

    def close(self) -> None: ...


@runtime_checkable
class Bounded(Protocol):
    """A store that makes room itself; `on_evict` is called with the keys of the blocks that leave for that."""

    on_evict: Callable[[Iterable[BlockKey]], None]


def joined(buffers: Sequence[Buffer]) -> Buffer:
    """The bytes of all buffers; a single one that cannot be changed is not copied."""
    return buffers[0] if len(buffers) == 1 and memoryview(buffers[0]).readonly else b"".join(buffers)


@dataclass(frozen=True)
class Limits:
    """Bytes of a store, and within it those of tenants; tenants that are not named have `default`, None: any."""

    capacity: int
    quotas: Mapping[str, int] = field(default_factory=dict)
    default: int | None = None

    def of(self, tenant: str) -> int:
        return min(self.capacity, self.quotas.get(tenant, self.capacity if self.default is None else self.default))
