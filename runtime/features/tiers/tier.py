"""A store with its writing thread, measured speed and events. Failures of the store become misses."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import BoundedSemaphore, Lock
from typing import TypeVar

from runtime.calls import TierState
from runtime.features.tiers.block import BlockKey, Buffer, TierBlock
from runtime.features.tiers.lane import Lane
from runtime.features.tiers.ledger import Ledger
from runtime.features.tiers.store import BlockStore, Usage, size_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# Half-life of a measured rate, so that a store that was slow is tried again.
FORGET_S = 60.0
QUEUE_BYTES = 256 << 20


class Rate:
    """Measured speed of reads. It starts with a high assumed speed, so that a new store is tried."""

    def __init__(self, latency_s: float, s_per_byte: float, clock: Callable[[], float]):
        self._assumed = self._measured = (latency_s, s_per_byte)
        self._clock = clock
        self._at = clock()

    def now(self) -> tuple[float, float]:
        """Seconds per look-up, and seconds per byte."""
        kept = 0.5 ** ((self._clock() - self._at) / FORGET_S)
        latency, per_byte = (a + (m - a) * kept for a, m in zip(self._assumed, self._measured, strict=True))
        return latency, per_byte

    def measure(self, latency_s: float | None = None, s_per_byte: float | None = None) -> None:
        latency, per_byte = self.now()
        self._measured = (
            latency if latency_s is None else latency + 0.3 * (latency_s - latency),
            per_byte if s_per_byte is None else per_byte + 0.3 * (s_per_byte - per_byte),
        )
        self._at = self._clock()


class _Gate:
    """A circuit breaker: admits a few calls at a time, and no call for a while after a failure."""

    def __init__(self, calls: int, clock: Callable[[], float]):
        self._slots = BoundedSemaphore(calls)
        self._clock = clock
        self._pause_s = 0.0
        self._opens_at = clock()

    @property
    def is_open(self) -> bool:
        return self._clock() >= self._opens_at

    @contextmanager
    def passage(self) -> Iterator[None]:
        """Run one call in a slot. Raises OSError if no slot becomes free. Any OSError shuts the gate."""
        try:
            if not self._slots.acquire(timeout=WAIT_S):
                raise TimeoutError("earlier calls have not returned")
            try:
                yield
            finally:
                self._slots.release()
        except OSError:
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._opens_at = self._clock() + self._pause_s
            raise
        self._pause_s = 0.0


class Tier:
    """A store, its thread and its measured speed.

    There is one gate for reads and one for writes. A gate shuts when a call fails, or gets no slot as earlier calls
    hang. While a gate is shut, its calls return misses at once. Failed erasures are repeated before any other call.

    Attributes:
        lane: the thread that writes.
        rate: measured speed of reads.
        counts: blocks `wanted` (no earlier tier had them), `hits`, `misses`, `written` and `refused` (too large); calls
            `failed` and `skipped`; `bytes_read`, `bytes_written`; and counts of the worker.
        last_usage: the last known contents.
    """

    def __init__(
        self,
        store: BlockStore,
        ledger: Ledger | None = None,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`ledger`: collects events of the blocks that enter and leave the store."""
        self.name = store.name
        self.outlives = store.outlives
        self.lane = Lane(store.name, queue_bytes)
        self.counts = Counter[str]()
        self.rate = Rate(0.001, 1 / 1e9, clock)
        self.last_usage = Usage(0, 0, None)
        self._store, self._ledger, self._clock = store, ledger or Ledger(), clock
        self._reads, self._writes = _Gate(4, clock), _Gate(1, clock)
        self._unerased: set[str | None] = set()
        self._warned = False
        self._lock = Lock()
        store.on_evict = partial(self._ledger.removed, self.name)

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        begun = self._clock()
        found = self.peek(keys)
        if found is None:
            return [False] * len(keys)
        self.rate.measure(latency_s=self._clock() - begun)
        self._ledger.removed(self.name, (key for key, is_there in zip(keys, found, strict=True) if not is_there))
        return found

    def peek(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """`contains_many` without measuring the speed; None if the store fails."""
        return self._call(self._reads, lambda: self._store.contains_many(keys))

    def get(self, block: TierBlock) -> Buffer | None:
        """The bytes stored under a block's key, which are not validated; None if there are none."""
        begun = self._clock()
        data = self._call(self._reads, lambda: self._store.get(block.key))
        if data is None:
            self.count("misses")
            self._ledger.removed(self.name, [block.key])
            return None
        size = memoryview(data).nbytes
        self.rate.measure(s_per_byte=(self._clock() - begun) / max(size, 1))
        self.count("hits")
        self.count("bytes_read", size)
        return data

    def found(self, block: TierBlock) -> None:
        """Note that the store has a block."""
        self._ledger.stored(self.name, block)

    def put(self, block: TierBlock, buffers: Sequence[Buffer]) -> None:
        self.found(block)  # before a later write may evict it
        done = self._call(self._writes, lambda: self._store.put(block.key, buffers, block.namespace.tenant))
        if done:
            self.count("written")
            self.count("bytes_written", size_of(buffers))
        else:
            self._ledger.removed(self.name, [block.key])
        if done is False:
            self.count("refused")

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._call(self._writes, lambda: self._store.touch(keys))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._call(self._writes, lambda: self._store.delete(keys))
        self._ledger.removed(self.name, keys)

    def erase(self, tenant: str | None) -> int | None:
        """Erase a tenant's blocks, or all (None); returns their number, or None on failure, to be repeated later."""
        self._unerased.add(tenant)
        erased = self._call(self._writes, lambda: self._erase_all(tenant), even_shut=True)
        self._ledger.erased(self.name, tenant)
        return erased

    def _erase_all(self, asked: str | None = None) -> int:
        erased = {tenant: self._store.erase(tenant) for tenant in list(self._unerased)}
        self._unerased -= erased.keys()
        return erased.get(asked, 0)

    def usage(self) -> Usage:
        """The contents; if the store fails, the last known contents."""
        self.last_usage = self._call(self._reads, self._store.usage) or self.last_usage
        return self.last_usage

    @property
    def is_open(self) -> bool:
        """Whether neither reads nor writes are shut."""
        return self._reads.is_open and self._writes.is_open

    def state(self) -> TierState:
        latency_s, s_per_byte = self.rate.now()
        queued = self.lane.queued_bytes
        return TierState(*self.last_usage, queued, self.is_open, latency_s, 1 / s_per_byte, dict(self.counts))

    def close(self) -> None:
        try:
            self._store.close()
        except OSError as error:
            self.fail(error)
        self._ledger.erased(self.name, None)

    def _call(self, gate: _Gate, call: Callable[[], T], even_shut: bool = False) -> T | None:
        if not gate.is_open and not even_shut:
            self.count("skipped")
            return None
        try:
            with gate.passage():
                if self._unerased and not even_shut:
                    self._erase_all()
                result = call()
        except OSError as error:
            self.fail(error)
            return None
        self._warned = self._warned and not self.is_open
        return result

    def fail(self, error: OSError) -> None:
        """Count a failure; logs only the first failure since the store last answered."""
        self.count("failed")
        if not self._warned:
            self._warned = True
            logger.warning("KV tier %s fails and is tried again later: %s", self.name, error)
