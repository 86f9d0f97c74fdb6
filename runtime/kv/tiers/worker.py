"""Reading and writing of blocks, in threads."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from runtime.kv.tiers.block import Block, BlockKey, Buffer, Format, Mismatch
from runtime.kv.tiers.lane import Lane
from runtime.kv.tiers.ledger import Ledger
from runtime.kv.tiers.store import BlockStore
from runtime.kv.tiers.tier import QUEUE_BYTES, Tier

logger = logging.getLogger(__name__)

USAGE_EVERY_S = 5.0
# Time for stores to say which blocks they hold, for operators.
_LOOK_S = 1.0


class Loaded(NamedTuple):
    """A block's payload, and the tier that had it."""

    payload: memoryview
    tier: str


class TierWorker:
    """Writes blocks to all tiers, and loads them from the first that has them.

    No method waits for a device, except `close` and `drain`. Blocks from a slower tier are also kept in main memory.

    Attributes:
        ledger: the blocks with an event that the stores are known to hold.

    Args:
        form: of the engine's blocks.
        stores: in any order; main memory is asked first, then the others in the order of their attachment.
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
        self._gatherer = Lane("gather", queue_bytes)
        # A store admits 4 reads at a time, so two stores may hang while a third one is read.
        self._loaders = ThreadPoolExecutor(12, thread_name_prefix="kv-load")
        self._tiers: dict[str, Tier] = {}  # replaced, never changed: threads read it
        self._num_erasures = 0
        self._promoting = Lock()
        self._usage_at = clock() - USAGE_EVERY_S
        for store in stores:
            self.attach(store)

    @property
    def names(self) -> list[str]:
        """The tiers, in the order in which they are asked."""
        return list(self._tiers)

    def attach(self, store: BlockStore) -> None:
        """Add a store; ValueError if there is one of its name."""
        if store.name in self._tiers:
            raise ValueError(f"there is a tier {store.name} already")
        tiers = [*self._tiers.values(), Tier(store, self.ledger, self._queue_bytes, self._clock)]
        self._tiers = {tier.name: tier for tier in sorted(tiers, key=lambda tier: tier.outlives)}

    def detach(self, name: str) -> Future[None] | None:
        """Leave a store, which is closed once its queue is written; None if there is none of that name."""
        if name not in self._tiers:
            return None
        left = self._tiers[name]
        self._tiers = {other: tier for other, tier in self._tiers.items() if other != name}
        closing = left.lane.run(left.close)
        left.lane.finish()
        return closing

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, block: Block, gather: Callable[[], Buffer], num_bytes: int) -> bool:
        """Queue a block for all stores; False, and counted, if there is no room in the queue.

        Args:
            block: the block to write.
            gather: returns the payload, which never changes again; called in another thread.
            num_bytes: size of the payload.
        """
        if self._tiers and self._gatherer.offer(num_bytes, partial(self._gather, block, gather)):
            return True
        self._num_dropped += 1
        return False

    def _gather(self, block: Block, gather: Callable[[], Buffer]) -> None:
        payload = gather()
        plain = self.form.encode(block, payload, sealed=False)
        for tier in self._tiers.values():
            if not tier.lane.offer(memoryview(payload).nbytes, partial(self._store, tier, block, payload, plain)):
                tier.count("dropped")

    def _store(self, tier: Tier, block: Block, payload: Buffer, plain: list[Buffer]) -> None:
        if tier.contains_many([block.key])[0]:
            tier.touch([block.key])
            tier.found(block)
            return
        try:
            tier.put(block, self.form.encode(block, payload) if tier.outlives and self.form.cipher else plain)
        except OSError as error:  # of the cipher
            tier.fail(error)

    def delete(self, name: Callable[[], Iterable[BlockKey]]) -> None:
        """Delete the blocks that `name` returns, in another thread, in all stores and queues."""

        def hand_on() -> None:
            keys = list(name())
            for tier in self._tiers.values():
                tier.lane.run(partial(tier.delete, keys))

        self._gatherer.run(hand_on)

    def erase(self, tenant: str | None, limit_s: float = 30.0) -> Future[dict[str, int | None]]:
        """Erase a tenant, or all (None), in all stores, queues and loads under way.

        The result is the number of blocks by tier, and with a cipher that of `keys`; None stands for a tier that failed
        or did not answer in time, and is erased before its next use.
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
        erasing = {name: tier.lane.run(partial(tier.erase, tenant)) for name, tier in self._tiers.items()}
        done, _ = wait(erasing.values(), limit_s)
        return keys | {name: future.result() if future in done else None for name, future in erasing.items()}

    # -- reading ---------------------------------------------------------------------------------------------

    def load(
        self, blocks: Sequence[Block], num_bytes: int, compute_s: float | None = None, limit_s: float = 10.0
    ) -> Future[list[Loaded]]:
        """Load as many leading blocks as there are.

        Args:
            blocks: consecutive blocks.
            num_bytes: size of a payload.
            compute_s: seconds in which a block is computed; a slower store is not read. None: every store is.
            limit_s: no further block is read after this time.
        """
        return self._loaders.submit(self._load, list(blocks), num_bytes, compute_s, self._clock() + limit_s)

    def _load(self, blocks: list[Block], num_bytes: int, compute_s: float | None, until: float) -> list[Loaded]:
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

    def _worth(self, tier: Tier, blocks: list[Block], num_bytes: int, compute_s: float | None) -> list[Block]:
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

    def _read(self, tier: Tier, block: Block, num_erasures: int) -> memoryview | None:
        """A block's payload; None if it is missing or damaged.

        A block of a tier that outlives the process is also kept in main memory, unless an erasure came between.
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
        """The names of the tiers that have each block; a tier that does not answer in time has none."""
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

    # -- operation -------------------------------------------------------------------------------------------

    def drain(self, limit_s: float = 60.0) -> None:
        """Wait until everything queued is written, as far as the time allows."""
        for lane in (self._gatherer, *(tier.lane for tier in self._tiers.values())):
            lane.wait(limit_s)

    def stats(self) -> dict[str, Any]:
        """Dropped blocks, and by tier counts, rates and contents; contents are some seconds old."""
        if self._clock() - self._usage_at >= USAGE_EVERY_S:
            self._usage_at = self._clock()
            for tier in self._tiers.values():
                self._loaders.submit(tier.usage)
        return {"dropped": self._num_dropped, "tiers": {name: tier.stats() for name, tier in self._tiers.items()}}

    def close(self, limit_s: float = 5.0) -> None:
        """Write what is queued, as far as the time allows, and close the stores."""
        until = self._clock() + limit_s
        self._gatherer.close(limit_s)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        for tier in self._tiers.values():
            tier.lane.run(tier.close)
            tier.lane.close(max(until - self._clock(), 0))
