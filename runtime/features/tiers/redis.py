"""A store of blocks in a Redis or Valkey server, which replicas share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from runtime.errors import ModelError
from runtime.features.tiers.block import HEAD_BYTES, BlockKey, Buffer, Head, Mismatch, read_head
from runtime.features.tiers.store import Usage, joined

T = TypeVar("T")

TIMEOUT_S = 1.0
_PREFIX = b"ramet:kv:"
_BATCH = 500


class RedisStore:
    """Blocks in a server's memory, bounded by its `maxmemory` and `maxmemory-policy` (use `allkeys-lru`).

    Args:
        url: `redis://[user:password@]host:port/database`, `rediss://` for TLS.
        timeout_s: time limit for each answer.

    Raises:
        ModelError: for an invalid URL; a server that does not answer is tried again later.
    """

    name = "store"
    outlives = True

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, option: str = "--kv-store"):
        self.on_evict: Callable[[Iterable[BlockKey]], None] = lambda keys: None  # the server does not report evictions
        try:
            self._redis: Any = Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_read_size=1 << 20,  # reads a block in one piece, not in 16
                retry=Retry(NoBackoff(), 0),  # a block that cannot be read is computed instead
            )
        except (ValueError, TypeError) as error:
            raise ModelError(f"{option}: {error}") from None

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [bool(found) for found in self._each(keys, lambda pipe, name: pipe.exists(name))]

    def get(self, key: BlockKey) -> bytes | None:
        return _as_os_error(lambda: self._redis.get(_PREFIX + key))

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str) -> bool:
        try:
            _as_os_error(lambda: self._redis.set(_PREFIX + key, joined(buffers)))
        except _NoRoom:
            return False
        return True

    def touch(self, keys: Iterable[BlockKey]) -> None:
        self._each(keys, lambda pipe, name: pipe.touch(name))

    def delete(self, keys: Iterable[BlockKey]) -> None:
        self._each(keys, lambda pipe, name: pipe.unlink(name))

    def erase(self, tenant: str | None) -> int:
        erased = 0
        for heads in self._scan():
            gone = [key for key, head in heads if tenant is None or not isinstance(head, Head) or head.tenant == tenant]
            erased += sum(self._each(gone, lambda pipe, name: pipe.unlink(name)))
        return erased

    def usage(self) -> Usage:
        """Bytes and `maxmemory` of the whole server; every key of the database counts as a block."""
        memory, blocks = _as_os_error(lambda: (self._redis.info("memory"), self._redis.dbsize()))
        return Usage(memory["used_memory"], blocks, memory["maxmemory"] or None)

    def close(self) -> None:
        _as_os_error(self._redis.close)

    def _scan(self) -> Iterator[list[tuple[BlockKey, Head | Mismatch]]]:
        """The heads of all blocks, in batches."""
        names = self._redis.scan_iter(_PREFIX + b"*", _BATCH)
        while batch := _as_os_error(lambda: list(islice(names, _BATCH))):
            keys = [name.removeprefix(_PREFIX) for name in batch]
            begins = self._each(keys, lambda pipe, name: pipe.getrange(name, 0, HEAD_BYTES - 1))
            yield [(key, read_head(begin)) for key, begin in zip(keys, begins, strict=True)]

    def _each(self, keys: Iterable[BlockKey], add: Callable[[Any, bytes], Any]) -> list[Any]:
        """The answers to one command for each key, in one round trip."""
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                add(pipe, _PREFIX + key)
            return _as_os_error(pipe.execute)


class _NoRoom(OSError):
    """The server is full and evicts nothing."""


def _as_os_error(call: Callable[[], T]) -> T:
    try:
        return call()
    except OutOfMemoryError as error:
        raise _NoRoom(str(error)) from None
    except RedisError as error:
        raise OSError(str(error)) from None
