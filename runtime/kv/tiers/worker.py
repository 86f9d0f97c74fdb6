"""All reading and writing of blocks, in threads of its own."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock, get_native_id
from typing import Any, NamedTuple

from runtime.kv.tiers.block import Block, BlockKey, Buffer, Format, Frame, Mismatch
from runtime.kv.tiers.guard import GuardedStore
from runtime.kv.tiers.ledger import Ledger
from runtime.kv.tiers.store import BlockStore, Bounded

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
USAGE_EVERY_S = 5.0
# Time for a store to say what it has, to somebody who looks on.
_LOOK_S = 1.0
# Of threads that write.
_NICE = 19


class Loaded(NamedTuple):
    """A block's payload, and the store that had it."""

    payload: memoryview
    tier: str


def _stand_back() -> None:
    """Let this thread run where the kernels leave a core idle: they wait for each other."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)


class _Lane:
    """One thread that runs tasks in order; those that its queue has no room for are refused."""

    def __init__(self, name: str, queue_bytes: int):
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"kv-{name}", initializer=_stand_back)
        self._room = queue_bytes
        self._lock = Lock()
        self.queued_bytes = 0

    def offer(self, size: int, task: Callable[[], None]) -> bool:
        with self._lock:
            if self.queued_bytes + size > self._room:
                return False
            self.queued_bytes += size
        try:
            self.run(partial(self._run, size, task))
        except RuntimeError:  # closed
            return False
        return True

    def _run(self, size: int, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:  # the next ones have to be written all the same
            logger.exception("a block of KV was not written")
        finally:
            with self._lock:
                self.queued_bytes -= size

    def run(self, task: Callable[[], Any]) -> Future[Any]:
        """Run a task behind all that were accepted before."""
        return self._threads.submit(task)

    def close(self, limit_s: float, last: Callable[[], None]) -> None:
        """Finish what is queued, and then `last`, as far as the time allows."""
        wait([self.run(last)], limit_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def end(self) -> None:
        """Take nothing more, and finish what is queued, whenever that is."""
        self._threads.shutdown(wait=False)


class _Tier(NamedTuple):
    store: GuardedStore
    lane: _Lane


class TierWorker:
    """Writes blocks to all stores, and loads them from the first that has them.

    No method waits for a device, except for `close`. Blocks from a slower store are kept in the host's memory as well.

    Attributes:
        ledger: the blocks with an event that the stores are known to hold.

    Args:
        form: of the engine's blocks.
        stores: any order; those that end with the process are asked first, then in the order of their attachment.
        queue_bytes: most bytes that wait for each store; blocks beyond that are dropped and counted.
    """

    def __init__(
        self,
        form: Format,
        stores: Sequence[BlockStore] = (),
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.form = form
        self.ledger = Ledger()
        self._queue_bytes = queue_bytes
        self._clock = clock
        self._num_dropped = 0
        self._gatherer = _Lane("gather", queue_bytes)
        # A store lets 4 reads pass at a time, so that two stores may hang and a third one is read.
        self._loaders = ThreadPoolExecutor(12, thread_name_prefix="kv-load")
        self._tiers: dict[str, _Tier] = {}  # replaced, never changed: threads look at it
        self._num_erasures = 0
        self._promoting = Lock()
        self._usage_at = clock() - USAGE_EVERY_S
        for store in stores:
            self.attach(store)

    @property
    def names(self) -> list[str]:
        """Of the stores, in the order in which they are asked."""
        return list(self._tiers)

    @property
    def queued_bytes(self) -> int:
        """Payloads that wait for anything."""
        return self._gatherer.queued_bytes + sum(tier.lane.queued_bytes for tier in self._tiers.values())

    def attach(self, store: BlockStore) -> None:
        """Add a store; ValueError if there is one of its name."""
        if store.name in self._tiers:
            raise ValueError(f"there is a tier {store.name} already")
        if isinstance(store, Bounded):
            store.on_evict = partial(self.ledger.removed, store.name)
        tiers = [*self._tiers.values(), _Tier(GuardedStore(store, self._clock), _Lane(store.name, self._queue_bytes))]
        self._tiers = {tier.store.name: tier for tier in sorted(tiers, key=lambda tier: tier.store.outlives)}

    def detach(self, name: str) -> Future[None] | None:
        """Leave a store; it is closed once what is queued for it is written. None if there is none of that name."""
        if name not in self._tiers:
            return None
        left = self._tiers[name]
        self._tiers = {other: tier for other, tier in self._tiers.items() if other != name}
        closing = left.lane.run(partial(self._close, left.store))
        left.lane.end()
        return closing

    def _close(self, store: GuardedStore) -> None:
        store.close()
        self.ledger.erased(store.name, None)

    def write(
        self,
        block: Block,
        gather: Callable[[], Frame],
        num_bytes: int,
        reason: str,
        done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Queue a block for all stores; False, and counted, if there is no room in the queue.

        Args:
            block: what is written.
            gather: returns a frame with the payload, which nobody changes later; called in another thread.
            num_bytes: size of the payload.
            reason: a word that is kept with the block.
            done: called once, in another thread, when the source of the payload is needed no more; not after `close`.
        """
        if self._tiers and self._gatherer.offer(num_bytes, partial(self._gather, block, gather, reason, done)):
            return True
        self._num_dropped += 1
        return False

    def _gather(self, block: Block, gather: Callable[[], Frame], reason: str, done: Callable[[], None]) -> None:
        try:
            frame = gather()
        finally:
            done()
        stored, size = self.form.close(block, frame), len(frame.payload)
        for store, lane in self._tiers.values():
            if not lane.offer(size, partial(self._store, store, block, frame, stored, reason)):
                store.count("dropped")

    def _store(self, store: GuardedStore, block: Block, frame: Frame, stored: memoryview, reason: str) -> None:
        if store.contains_many([block.key])[0]:
            store.touch([block.key])
            self.ledger.stored(store.name, block)
            return
        try:
            is_sealed = store.outlives and self.form.cipher is not None
            buffers = self.form.encode(block, frame.payload) if is_sealed else [stored]
        except OSError as error:
            store.fail(error)
        else:
            self._put(store, block, buffers, reason)

    def _put(self, store: GuardedStore, block: Block, buffers: Sequence[Buffer], reason: str) -> None:
        """Tell of a block before others may evict it."""
        self.ledger.stored(store.name, block)
        if not store.put(block.key, buffers, block.namespace.tenant, reason):
            self.ledger.removed(store.name, [block.key])

    def load(
        self, blocks: Sequence[Block], num_bytes: int, compute_s: float | None = None, limit_s: float = 10.0
    ) -> Future[list[Loaded]]:
        """Load as many leading blocks as there are.

        Args:
            blocks: that follow each other.
            num_bytes: size of a payload.
            compute_s: seconds in which a block is computed; a store that would take longer is not read. None: any.
            limit_s: no further block is read after this time.
        """
        return self._loaders.submit(self._load, list(blocks), num_bytes, compute_s, self._clock() + limit_s)

    def _load(self, blocks: list[Block], num_bytes: int, compute_s: float | None, until: float) -> list[Loaded]:
        found: list[Loaded] = []
        num_erasures, before = self._num_erasures, -1
        while before < len(found) < len(blocks):
            before = len(found)
            for store, _ in self._tiers.values():
                for block in self._worth(store, blocks[len(found) :], num_bytes, compute_s):
                    loaded = self._read(store, block) if self._clock() < until else None
                    if loaded is None:
                        break
                    data, payload = loaded
                    found.append(Loaded(payload, store.name))
                    if store.outlives:
                        is_sealed = self.form.cipher is not None
                        plain = self.form.encode(block, payload, sealed=False) if is_sealed else [data]
                        self._promote(block, plain, num_erasures)
        return found if num_erasures == self._num_erasures else []

    def _worth(self, store: GuardedStore, blocks: list[Block], num_bytes: int, compute_s: float | None) -> list[Block]:
        """The leading blocks that a store has and the host's memory has not, if it is quicker than computing them."""
        if not blocks:
            return []
        keys = [block.key for block in blocks]
        if store.outlives:
            for host in (tier.store for tier in self._tiers.values() if not tier.store.outlives):
                keys = keys[: [*host.contains_many(keys), True].index(True)]
        store.count("wanted", len(keys))
        found = store.contains_many(keys)
        self.ledger.removed(store.name, (key for key, is_there in zip(keys, found, strict=True) if not is_there))
        number = [*found, False].index(False)
        latency_s, s_per_byte = store.rate.now()
        if compute_s is not None and number and latency_s + number * num_bytes * s_per_byte > number * compute_s:
            store.count("too_slow")
            return []
        return blocks[:number]

    def _read(self, store: GuardedStore, block: Block) -> tuple[Buffer, memoryview] | None:
        """A stored block and its payload."""
        if (data := store.get(block.key)) is None:
            self.ledger.removed(store.name, [block.key])
            return None
        payload = self.form.decode(data, block, sealed=store.outlives)
        if isinstance(payload, Mismatch):
            store.count(f"mismatch_{payload}")
            self._delete(store, [block.key])
            return None
        self.ledger.stored(store.name, block)
        return data, payload

    def _promote(self, block: Block, buffers: Sequence[Buffer], num_erasures: int) -> None:
        """Keep a block in the host's memory, unless something was erased since it was asked for."""
        for store in (tier.store for tier in self._tiers.values() if not tier.store.outlives):
            with self._promoting:
                if num_erasures == self._num_erasures:
                    self._put(store, block, buffers, "loaded")

    def where(self, keys: Sequence[BlockKey | None]) -> Future[list[list[str]]]:
        """The names of the stores that have each block, in their order; a store that does not answer has none."""
        return self._loaders.submit(self._where, keys)

    def _where(self, keys: Sequence[BlockKey | None]) -> list[list[str]]:
        known = list({key for key in keys if key is not None})
        asking = {name: self._loaders.submit(tier.store.peek, known) for name, tier in self._tiers.items()}
        done, _ = wait(asking.values(), _LOOK_S)
        found: dict[BlockKey | None, list[str]] = {key: [] for key in known}
        for name, future in asking.items():
            for key, has in zip(known, (future in done and future.result()) or (), strict=False):
                if has:
                    found[key].append(name)
        return [found.get(key, []) for key in keys]

    def erase(self, tenant: str | None, limit_s: float = 30.0) -> Future[dict[str, int | None]]:
        """Erase a tenant, or all (None), everywhere, with all that was queued and is being loaded.

        The number of blocks by store, with a cipher of `keys` as well; None for what failed or did not answer in time.
        A store is erased before its next use then.
        """
        return self._loaders.submit(self._erase, tenant, limit_s)

    def _erase(self, tenant: str | None, limit_s: float) -> dict[str, int | None]:
        keys: dict[str, int | None] = {}
        if self.form.cipher:
            try:
                keys["keys"] = self.form.cipher.erase(tenant)
            except OSError as error:
                logger.warning("the key of a tenant is not erased: %s", error)
                keys["keys"] = None
        self._gatherer.run(lambda: None).result()
        with self._promoting:
            self._num_erasures += 1
        tiers = self._tiers
        erasing = {name: tier.lane.run(partial(self._erase_in, tier.store, tenant)) for name, tier in tiers.items()}
        done, _ = wait(erasing.values(), limit_s)
        return keys | {name: future.result() if future in done else None for name, future in erasing.items()}

    def _erase_in(self, store: GuardedStore, tenant: str | None) -> int | None:
        erased = store.erase(tenant)
        self.ledger.erased(store.name, tenant)
        return erased

    def delete(self, name: Callable[[], Iterable[BlockKey]]) -> None:
        """Delete the blocks that `name` names, in another thread, everywhere; those that are queued now, too."""

        def hand_on() -> None:
            keys = list(name())
            for store, lane in self._tiers.values():
                lane.run(partial(self._delete, store, keys))

        self._gatherer.run(hand_on)

    def _delete(self, store: GuardedStore, keys: Sequence[BlockKey]) -> None:
        store.delete(keys)
        self.ledger.removed(store.name, keys)

    def drain(self, limit_s: float = 60.0) -> None:
        """Wait until all is written that was queued before, as far as the time allows."""
        wait([self._gatherer.run(lambda: None)], limit_s)
        wait([tier.lane.run(lambda: None) for tier in self._tiers.values()], limit_s)

    def stats(self) -> dict[str, Any]:
        """Dropped blocks, and by store counts, rates and contents; contents are some seconds old."""
        if self._clock() - self._usage_at >= USAGE_EVERY_S:
            self._usage_at = self._clock()
            for store, _ in self._tiers.values():
                self._loaders.submit(store.usage)
        return {"dropped": self._num_dropped, "tiers": {name: _stats(tier) for name, tier in self._tiers.items()}}

    def close(self, limit_s: float = 5.0) -> None:
        """Write what is queued, as far as the time allows, and close the stores."""
        until = self._clock() + limit_s
        self._gatherer.close(limit_s, lambda: None)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        for store, lane in self._tiers.values():
            lane.close(max(until - self._clock(), 0), store.close)


def _stats(tier: _Tier) -> dict[str, Any]:
    latency_s, s_per_byte = tier.store.rate.now()
    return {
        **tier.store.last_usage._asdict(),
        "queued_bytes": tier.lane.queued_bytes,
        "open": tier.store.is_open,
        "latency_s": latency_s,
        "bytes_per_s": 1 / s_per_byte,
        "counts": dict(tier.store.counts),
    }
