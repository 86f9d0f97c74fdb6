"""A store that may fail: bounded time, one warning, and another try later."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock
from typing import TypeVar

from runtime.kv.tiers.block import BlockKey, Buffer
from runtime.kv.tiers.store import BlockStore, Usage

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# Half of what a measured rate differs from the assumed one is forgotten in this time, so that a store that was slow is
# tried again.
FORGET_S = 60.0


class Rate:
    """Measured speed of reads; until then an assumed one, which is high, so that a store is tried."""

    def __init__(self, latency_s: float, s_per_byte: float, clock: Callable[[], float]):
        self._assumed = self._measured = (latency_s, s_per_byte)
        self._clock = clock
        self._at = clock()

    def now(self) -> tuple[float, float]:
        """Seconds of an enquiry, and seconds a byte."""
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
    """Lets a few calls at a time pass, and none for a while after one has failed."""

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
        """Raises OSError if there is none, or as the call itself does; then the gate shuts."""
        try:
            if not self._slots.acquire(timeout=WAIT_S):
                raise TimeoutError("no answer to earlier calls")
            try:
                yield
            finally:
                self._slots.release()
        except OSError:
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._opens_at = self._clock() + self._pause_s
            raise
        self._pause_s = 0.0


class GuardedStore:
    """A store whose failures are misses.

    A call that fails, or waits for others that do not return, shuts the gate of reads or that of writes; calls that
    come until it opens again are answered at once. Tenants whose erasure failed are erased before anything else.

    Attributes:
        counts: of blocks that were `wanted` here (no tier before it had them), `hits`, `misses`, `written`, `refused`
            (no room), of `failed` and `skipped` calls, `bytes_read`, `bytes_written`, and what its users count.
    """

    def __init__(self, store: BlockStore, clock: Callable[[], float] = time.monotonic):
        self.store = store
        self.name = store.name
        self.outlives = store.outlives
        self.counts = Counter[str]()
        self.rate = Rate(0.001, 1 / 1e9, clock)
        self._clock = clock
        self._reads, self._writes = _Gate(4, clock), _Gate(1, clock)
        self._owed: set[str | None] = set()
        self._warned = False
        self.last_usage = Usage(0, 0, None)
        self._lock = Lock()

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        begun = self._clock()
        found = self.peek(keys)
        if found is None:
            return [False] * len(keys)
        self.rate.measure(latency_s=self._clock() - begun)
        return found

    def peek(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """`contains_many` of any number of keys, which says nothing of the rate; None if the store fails."""
        return self._call(self._reads, lambda: self.store.contains_many(keys))

    def get(self, key: BlockKey) -> Buffer | None:
        begun = self._clock()
        data = self._call(self._reads, lambda: self.store.get(key))
        if data is None:
            self.count("misses")
            return None
        size = memoryview(data).nbytes
        self.rate.measure(s_per_byte=(self._clock() - begun) / max(size, 1))
        self.count("hits")
        self.count("bytes_read", size)
        return data

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str, reason: str) -> bool:
        done = self._call(self._writes, lambda: self.store.put(key, buffers, tenant, reason))
        if done:
            self.count("written")
            self.count("bytes_written", sum(memoryview(buffer).nbytes for buffer in buffers))
        elif done is False:
            self.count("refused")
        return bool(done)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._call(self._writes, lambda: self.store.touch(keys))

    def delete(self, keys: Sequence[BlockKey]) -> None:
        self._call(self._writes, lambda: self.store.delete(keys))

    def erase(self, tenant: str | None) -> int | None:
        """Number of erased blocks; None if the store failed: then it is tried again before any other call."""
        self._owed.add(tenant)
        return self._call(self._writes, lambda: self._settle(tenant), even_shut=True)

    def _settle(self, asked: str | None = None) -> int:
        erased = {tenant: self.store.erase(tenant) for tenant in list(self._owed)}
        self._owed -= erased.keys()
        return erased.get(asked, 0)

    def usage(self) -> Usage:
        """The last answer of a store that fails."""
        self.last_usage = self._call(self._reads, self.store.usage) or self.last_usage
        return self.last_usage

    @property
    def is_open(self) -> bool:
        """Whether neither reads nor writes are shut."""
        return self._reads.is_open and self._writes.is_open

    def close(self) -> None:
        try:
            self.store.close()
        except OSError as error:
            self.fail(error)

    def _call(self, gate: _Gate, call: Callable[[], T], even_shut: bool = False) -> T | None:
        if not gate.is_open and not even_shut:
            self.count("skipped")
            return None
        try:
            with gate.passage():
                if self._owed and not even_shut:
                    self._settle()
                result = call()
        except OSError as error:
            self.fail(error)
            return None
        self._warned = self._warned and not self.is_open
        return result

    def fail(self, error: OSError) -> None:
        """Count a failure; the first one since the store last answered is logged."""
        self.count("failed")
        if not self._warned:
            self._warned = True
            logger.warning("KV tier %s fails, and is tried again later: %s", self.name, error)
