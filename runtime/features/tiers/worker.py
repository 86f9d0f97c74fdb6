"""Reading and writing of blocks, in threads."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import NamedTuple

from runtime.calls import TierState
from runtime.features.tiers.block import BlockKey, Buffer, Format, Mismatch, TierBlock
from runtime.features.tiers.lane import Lane
from runtime.features.tiers.ledger import Ledger
from runtime.features.tiers.store import BlockStore
from runtime.features.tiers.tier import QUEUE_BYTES, Tier

logger = logging.getLogger(__name__)

USAGE_EVERY_S = 5.0
# Time between two looks for room in the queues.
_ROOM_S = 0.005
# Longest wait for stores that look up blocks for operators.
_LOOK_S = 1.0


class Loaded(NamedTuple):
    """A block's payload, and the tier that had it."""

    payload: memoryview
    tier: str


class TierWorker:
    """Writes blocks to all tiers, and loads them from the first that has them.

    No method waits for a device, except `close` and `drain`. Blocks from a slower tier are also kept in main memory.

    Attributes:
        ledger: collects KV events of the stores.

    Args:
        form: format of the engine's blocks.
        stores: main memory is read first, then the others in their order.
        queue_bytes: largest queue for each store, in bytes; blocks beyond it are dropped and counted.
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
        self.num_dropped = 0
        self._gatherer = Lane("gather", queue_bytes)
        # A store admits 4 reads at a time, so two stores may hang while a third one is read.
        self._loaders = ThreadPoolExecutor(12, thread_name_prefix="kv-load")
        tiers = [Tier(store, self.ledger, queue_bytes, clock) for store in stores]
        # Replaced, never changed: threads read it.
        self._tiers = {tier.name: tier for tier in sorted(tiers, key=lambda tier: tier.outlives)}
        self._num_erasures = 0
        self._promoting = Lock()
        self._usage_at = clock() - USAGE_EVERY_S

    @property
    def names(self) -> list[str]:
        """Names of the tiers, in the order in which they are read."""
        return list(self._tiers)

    def detach(self, name: str) -> None:
        """Remove a store, if one has the name, and close it once its queue is written."""
        if name in self._tiers:
            left = self._tiers[name]
            self._tiers = {other: tier for other, tier in self._tiers.items() if other != name}
            left.lane.run(left.close)
            left.lane.finish()

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, block: TierBlock, gather: Callable[[], Buffer], num_bytes: int) -> bool:
        """Queue a block for all stores; False if the queue has no room, which is counted.

        Args:
            block: the block to write.
            gather: returns the payload, which must not change afterwards; called in another thread.
            num_bytes: size of the payload.
        """
        if self._tiers and self._gatherer.offer(num_bytes, partial(self._gather, block, gather)):
            return True
        self.num_dropped += 1
        return False

    def _gather(self, block: TierBlock, gather: Callable[[], Buffer]) -> None:
        payload = gather()
        plain = self.form.encode(block, payload, sealed=False)
        for tier in self._tiers.values():
            if not tier.lane.offer(memoryview(payload).nbytes, partial(self._store, tier, block, payload, plain)):
                tier.count("dropped")

    def _store(self, tier: Tier, block: TierBlock, payload: Buffer, plain: list[Buffer]) -> None:
        if tier.contains_many([block.key])[0]:
            tier.touch([block.key])
            tier.found(block)
            return
        try:
            tier.put(block, self.form.encode(block, payload) if tier.outlives and self.form.cipher else plain)
        except OSError as error:  # of the cipher
            tier.fail(error)

    def delete(self, name: Callable[[], Iterable[BlockKey]]) -> None:
        """Delete blocks in all stores and queues; `name` returns their keys, in another thread."""

        def hand_on() -> None:
            keys = list(name())
            for tier in self._tiers.values():
                tier.lane.run(partial(tier.delete, keys))

        self._gatherer.run(hand_on)

    def erase(self, tenant: str | None, limit_s: float = 30.0) -> Future[dict[str, int | None]]:
        """Erase the blocks of a tenant, or of all (None), in all stores, queues and running loads.

        The result is the number of blocks by tier, and with a cipher the number of erased `keys`. None: the tier failed
        or did not answer in time; it is erased before its next use.
        """
        return self._loaders.submit(self._erase, tenant, limit_s)

    def _erase(self, tenant: str | None, limit_s: float) -> dict[str, int | None]:
        keys: dict[str, int | None] = {}
        if self.form.cipher:
            try:
                keys["keys"] = self.form.cipher.erase(tenant)
            except OSError as error:
                logger.warning("a tenant's encryption key could not be erased: %s", error)
                keys["keys"] = None
        self._gatherer.run(lambda: None).result()
        with self._promoting:
            self._num_erasures += 1
        erasing = {name: tier.lane.run(partial(tier.erase, tenant)) for name, tier in self._tiers.items()}
        done, _ = wait(erasing.values(), limit_s)
        return keys | {name: future.result() if future in done else None for name, future in erasing.items()}

    # -- reading ---------------------------------------------------------------------------------------------

    def load(
        self, blocks: Sequence[TierBlock], num_bytes: int, compute_s: float | None = None, limit_s: float = 10.0
    ) -> Future[list[Loaded]]:
        """Load blocks, up to the first block that no tier has.

        Args:
            blocks: consecutive blocks.
            num_bytes: size of a payload.
            compute_s: seconds that it takes to compute a block; slower stores are not read. None: all stores are read.
            limit_s: seconds after which no further block is read.
        """
        return self._loaders.submit(self._load, list(blocks), num_bytes, compute_s, self._clock() + limit_s)

    def _load(self, blocks: list[TierBlock], num_bytes: int, compute_s: float | None, until: float) -> list[Loaded]:
        found: list[Loaded] = []
        num_erasures, before = self._num_erasures, -1
        while before < len(found) < len(blocks):
            before = len(found)
            for tier in self._tiers.values():
                for block in self._worth(tier, blocks[len(found) :], num_bytes, compute_s):
                    payload = self._read(tier, block, num_erasures) if self._clock() < until else None
                    if payload is None:
                        break
                    found.append(Loaded(payload, tier.name))
        return found if num_erasures == self._num_erasures else []

    def _worth(self, tier: Tier, blocks: list[TierBlock], num_bytes: int, compute_s: float | None) -> list[TierBlock]:
        """The leading blocks that a tier has and main memory lacks, if loading is faster than computing."""
        if not blocks:
            return []
        keys = [block.key for block in blocks]
        if tier.outlives:
            for host in self._hosts():
                keys = keys[: [*host.contains_many(keys), True].index(True)]
        tier.count("wanted", len(keys))
        number = [*tier.contains_many(keys), False].index(False)
        latency_s, s_per_byte = tier.rate.now()
        if compute_s is not None and number and latency_s + number * num_bytes * s_per_byte > number * compute_s:
            tier.count("too_slow")
            return []
        return blocks[:number]

    def _read(self, tier: Tier, block: TierBlock, num_erasures: int) -> memoryview | None:
        """A block's payload; None if it is missing or damaged.

        A block of a tier that outlives the process is also kept in main memory, unless an erasure has come in between.
        """
        if (data := tier.get(block)) is None:
            return None
        payload = self.form.decode(data, block, sealed=tier.outlives)
        if isinstance(payload, Mismatch):
            tier.count(f"mismatch_{payload}")
            tier.delete([block.key])
            return None
        tier.found(block)
        if tier.outlives:
            plain = self.form.encode(block, payload, sealed=False) if self.form.cipher else [data]
            for host in self._hosts():
                with self._promoting:
                    if num_erasures == self._num_erasures:
                        host.put(block, plain)
        return payload

    def _hosts(self) -> list[Tier]:
        return [tier for tier in self._tiers.values() if not tier.outlives]

    def where(self, keys: Sequence[BlockKey | None]) -> Future[list[list[str]]]:
        """For each key, the names of the tiers that have the block. A tier that does not answer in 1 s is left out."""
        return self._loaders.submit(self._where, keys)

    def _where(self, keys: Sequence[BlockKey | None]) -> list[list[str]]:
        known = list({key for key in keys if key is not None})
        asking = {name: self._loaders.submit(tier.peek, known) for name, tier in self._tiers.items()}
        done, _ = wait(asking.values(), _LOOK_S)
        found: dict[BlockKey | None, list[str]] = {key: [] for key in known}
        for name, future in asking.items():
            for key, has in zip(known, (future in done and future.result()) or (), strict=False):
                if has:
                    found[key].append(name)
        return [found.get(key, []) for key in keys]

    def capacity(self, name: str) -> int | None:
        """The space of a store in bytes; None if it has no bound."""
        return self._tiers[name].usage().capacity

    def wait_for_room(self, num_bytes: int, until: float) -> bool:
        """Wait until all queues have room for a payload; False if they have none by the time `until`."""
        lanes = self._lanes()
        while any(lane.queued_bytes + num_bytes > self._queue_bytes // 2 for lane in lanes):
            if self._clock() > until:
                return False
            time.sleep(_ROOM_S)
        return self._clock() <= until

    # -- operation -------------------------------------------------------------------------------------------

    def drain(self, limit_s: float = 60.0) -> None:
        """Wait until all queued blocks are written, at most `limit_s` seconds."""
        until = self._clock() + limit_s
        for lane in self._lanes():
            lane.wait(max(until - self._clock(), 0))

    def _lanes(self) -> list[Lane]:
        lanes = [tier.lane for tier in self._tiers.values()]
        return [self._gatherer, *lanes]

    def states(self) -> dict[str, TierState]:
        """The tiers by name. Contents may be some seconds old."""
        if self._clock() - self._usage_at >= USAGE_EVERY_S:
            self._usage_at = self._clock()
            for tier in self._tiers.values():
                self._loaders.submit(tier.usage)
        return {name: tier.state() for name, tier in self._tiers.items()}

    def close(self, limit_s: float = 5.0) -> None:
        """Write queued blocks for at most `limit_s` seconds, and close the stores."""
        until = self._clock() + limit_s
        self._gatherer.close(limit_s)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        for tier in self._tiers.values():
            tier.lane.run(tier.close)
            tier.lane.close(max(until - self._clock(), 0))
