"""KV events of the blocks that stores hold."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from threading import Lock

from radix.events import Event, Removed
from runtime.features.tiers.block import BlockKey, TierBlock

# Most blocks to remember of each store; beyond that, the oldest counts as gone.
MOST_BLOCKS = 1 << 17


class Ledger:
    """Collects events of blocks that enter and leave stores, until `take`; any thread may call it.

    The ledger can be wrong: a store may hold blocks of earlier processes or other replicas, which are added when this
    process reads or writes them. Other processes may evict blocks, which are removed when this process misses them.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: defaultdict[str, OrderedDict[BlockKey, Removed]] = defaultdict(OrderedDict)
        self._news: defaultdict[str, list[Event]] = defaultdict(list)

    def stored(self, store: str, block: TierBlock) -> None:
        """Add the event of a block, unless the store is known to hold it."""
        if block.event is None:
            return
        with self._lock:
            held = self._held[store]
            if block.key not in held:
                held[block.key] = Removed(block.event.hashes, block.namespace)
                self._news[store].append(block.event)
                if len(held) > MOST_BLOCKS:
                    self._remove(store, [next(iter(held))])

    def removed(self, store: str, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            self._remove(store, keys)

    def _remove(self, store: str, keys: Iterable[BlockKey]) -> None:
        held = self._held[store]
        for key in keys:
            if (event := held.pop(key, None)) is not None:
                self._news[store].append(event)

    def erased(self, store: str, tenant: str | None) -> None:
        """Remove the blocks of a tenant, or of all (None)."""
        with self._lock:
            held = self._held[store]
            self._remove(store, [key for key, event in held.items() if tenant in (None, event.namespace.tenant)])

    def take(self) -> dict[str, list[Event]]:
        """Return the events since the last call, by store."""
        with self._lock:
            taken, self._news = self._news, defaultdict(list)
        return taken
