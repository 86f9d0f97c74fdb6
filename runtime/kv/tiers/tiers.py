"""The tree's lower floors, as the engine sees them."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from radix import Namespace, Node, Stored, Watcher, path
from radix.events import block_hashes
from radix.node import TOKEN_BYTES
from radix.stats import Cause
from runtime.kv.cache import PagedCache
from runtime.kv.tiers.block import ROOT, Block, BlockKey
from runtime.kv.tiers.copies import Copies
from runtime.kv.tiers.loads import Load, Part
from runtime.kv.tiers.worker import TierWorker
from runtime.request import Run, Segment

# A block has so many bytes, or a little more; of small models so many tokens.
BLOCK_BYTES, MOST_TOKENS = 1 << 20, 64
# Rows that attend to chosen rows of documents are nobody else's.
_APPROXIMATE = "fused:"
# Time for which a block that no store has is not looked for again, and how many such are remembered.
_ABSENT_S, _MOST_ABSENT = 2.0, 1 << 16
# Blocks that are believed to have been written at their second use.
_MOST_WRITTEN = 1 << 16
# The shortest and the longest time for a load; between them, as long as computing would take.
_LEAST_S, _MOST_S = 0.25, 30.0
# More than a load's time, after which nobody waits for a store that hangs.
_GRACE_S = 0.5
# Time to write what is queued at the end.
_CLOSE_S = 5.0
# Bytes of all loads under way.
_MOST_BYTES = 1 << 30


class Tiers(Watcher):
    """Keeps blocks of what the tree evicts, and of what is used a second time; brings them back.

    Borders of blocks lie at fixed multiples of tokens from the root of a namespace. An entry's last block may be
    shorter.

    Attributes:
        loads: that have not ended.
        counters: of the engine's side; `worker.stats()` has those of the stores.
        loaded_tokens: by store.
        keys: by the pages of the tree whose blocks are known to have been written or loaded.
    """

    def __init__(self, cache: PagedCache, worker: TierWorker, clock: Callable[[], float] = time.monotonic):
        pool = cache.pool
        pages = min(-(-BLOCK_BYTES // pool.page_bytes), MOST_TOKENS // pool.page_size)
        self.block_pages = max(pages, 1)
        self.loads: list[Load] = []
        self._rows = self._seconds = 0.0
        self.counters = dict.fromkeys(("tier_loads", "tier_loads_late"), 0)
        self.loaded_tokens = Counter[str]()
        self.keys: dict[int, BlockKey] = {}
        self.worker = worker
        self._cache, self._pool, self._clock = cache, pool, clock
        self._page_bytes = pool.page_size * TOKEN_BYTES
        self._copies = Copies(pool, worker)
        self._written: OrderedDict[BlockKey, None] = OrderedDict()
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="kv-fill")
        self._news = threading.Event()
        cache.tree.watch(self)
        cache.on_use, cache.on_distrust = self.used, self.forget
        pool.before_write = self._copies.settle

    # -- out -------------------------------------------------------------------------------------------------

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """Keep the blocks that end in the pages that leave, unless these are to be gone."""
        if cause != "flush":
            self._write(node, kept_pages, "evicted")
        if self.keys:
            for page in node.pages[kept_pages:]:
                self.keys.pop(page, None)

    def used(self, node: Node) -> None:
        """Write the path that ends in a node, as far as it is used a second time."""
        for above in path(node):
            if above.hits == 1:
                self._write(above, 0, "used")

    def save(self, node: Node) -> None:
        """Write the blocks that end in a node."""
        self._write(node, 0, "saved")

    def _write(self, node: Node, first_page: int, reason: str) -> None:
        """Write the blocks that end in the pages of a node from `first_page` on."""
        if not self.worker.names or node.namespace.entry.startswith(_APPROXIMATE):
            return
        size, end = self.block_pages, sum(len(above.pages) for above in path(node))
        is_end = node.meta is not None and node.meta.tokens <= end * self._pool.page_size
        first = (end - len(node.pages) + first_page) // size
        last = -(-end // size) if is_end else end // size
        if first >= last:
            return
        nodes = list(path(node))[::-1]
        pages = array("i", b"".join(above.pages.tobytes() for above in nodes))
        blocks = self._blocks(b"".join(above.key for above in nodes), node.namespace, is_end)
        for number in range(first, last):
            block, own = blocks[number], pages[number * size : (number + 1) * size]
            if reason == "evicted" or block.key not in self._written:
                accepted = self._copies.add(block, own, reason)
                self._absent.pop(block.key, None)
                if accepted and reason != "evicted":
                    _remember(self._written, block.key, None, _MOST_WRITTEN)
            if reason != "evicted":
                self.keys.update(dict.fromkeys(own, block.key))

    def _path_of(self, node: Node) -> tuple[bytes, Namespace, bool]:
        """The tokens up to the end of a node, their namespace, and whether they are an entry."""
        tokens = b"".join(above.key for above in reversed(list(path(node))))
        return tokens, node.namespace, node.meta is not None

    def _blocks(self, tokens: bytes, namespace: Namespace, is_entry: bool) -> list[Block]:
        """The blocks of a run from its root on; of an entry with the last, shorter one."""
        size = self.block_pages * self._page_bytes
        form = self.worker.form
        blocks = list(form.chain(namespace, tokens, size))
        if is_entry and (rest := tokens[len(blocks) * size :]):
            key = form.key(blocks[-1].key if blocks else ROOT, namespace, rest)
            blocks.append(Block(key, namespace, rest))
        if self._cache.events is not None:
            hashes = block_hashes(tokens, self._page_bytes, None, namespace)
            for number, block in enumerate(blocks):
                at = number * self.block_pages
                own, parent = hashes[at : at + self.block_pages], hashes[at - 1] if at else None
                blocks[number] = block._replace(event=Stored(own, parent, block.tokens, namespace))
        return blocks

    # -- in --------------------------------------------------------------------------------------------------

    def ask(self, runs: Iterable[Run], owner: Namespace) -> Load | None:
        """A load for which a request that reads these runs should wait; None: the stores have nothing for it."""
        if not self.worker.names:
            return None
        parts, joined = [], None
        for run in runs:
            part = self._missing(run)
            if part is None:
                continue
            load = self._bringing(part.blocks[0].key)
            joined = joined or load
            if load is None:
                parts.append(part)
        if not parts:
            return joined
        pages = sum(self._num_pages(part.blocks) for part in parts)
        load = Load(parts, owner, pages * self._pool.page_bytes, self._clock())
        self.loads.append(load)
        self._start()
        return load

    def _missing(self, run: Run) -> Part | None:
        """The blocks behind what the tree has of a run; None: there are none, or no store has any, as is known."""
        if run.namespace.entry.startswith(_APPROXIMATE):
            return None
        tokens = run.tokens.tobytes()
        whole = len(tokens) // self._page_bytes
        has = len(self._cache.tree.match(tokens, run.namespace).pages)
        if has >= (whole if run.meta is not None else whole // self.block_pages * self.block_pages):
            return None
        first = has // self.block_pages
        blocks = self._blocks(tokens, run.namespace, run.meta is not None)[first:]
        if self._absent.get(blocks[0].key, 0.0) > self._clock():
            return None
        return Part(run, first * self.block_pages, blocks)

    def _num_pages(self, blocks: Iterable[Block]) -> int:
        return sum(len(block.tokens) for block in blocks) // self._page_bytes

    def _bringing(self, key: BlockKey) -> Load | None:
        mine = (load for load in self.loads for part in load.parts for block in part.blocks if block.key == key)
        return next(mine, None)

    def _start(self) -> None:
        """Begin loads in the order of their requests, as many as memory allows."""
        num_bytes = sum(load.num_bytes for load in self.loads if load.deadline_s is not None)
        for load in self.loads:
            if load.deadline_s is not None:
                continue
            if num_bytes and num_bytes + load.num_bytes > _MOST_BYTES:
                break
            num_bytes += load.num_bytes
            self._begin(load)

    def _begin(self, load: Load) -> None:
        pool = self._pool
        tokens = load.num_bytes // pool.page_bytes * pool.page_size
        limit_s = min(max(tokens * self.token_s, _LEAST_S), _MOST_S) if self.token_s else _MOST_S
        load.deadline_s = self._clock() + limit_s + _GRACE_S
        size = self.block_pages * pool.page_bytes
        compute_s = self.block_pages * pool.page_size * self.token_s or None
        for part in load.parts:
            part.loading = self.worker.load(part.blocks, size, compute_s, limit_s)
            part.loading.add_done_callback(self.tell)

    def tell(self, _: Future[Any]) -> None:
        """Let `wait` return: a future is done."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Return once there may be news of a load, or after some seconds."""
        self._news.wait(seconds)

    def poll(self, patience_s: float = 0.0) -> list[Load]:
        """Advance the loads; those that have ended, whose blocks are in the tree.

        `patience_s`: a wait for those that were asked for less than that ago.
        """
        left_s = max((load.asked_s for load in self.loads), default=0.0) + patience_s - self._clock()
        if left_s > 0:
            self._news.wait(left_s)
        self._news.clear()
        ended = [load for load in self.loads if load.deadline_s is not None and self._advance(load, load.deadline_s)]
        if ended:
            self.loads = [load for load in self.loads if load not in ended]
            self._start()
        return ended

    def _advance(self, load: Load, deadline_s: float) -> bool:
        """Go on with a load; True once it has ended."""
        is_late = self._clock() > deadline_s
        for part in load.parts:
            if part.loading is not None and (part.loading.done() or is_late):
                self.counters["tier_loads_late"] += not part.loading.done()
                part.found = part.loading.result() if part.loading.done() else []
                part.loading = None
                if not load.is_void:
                    self._fill(load, part)
        if any(p.loading is not None or (p.filling is not None and not p.filling.done()) for p in load.parts):
            return False
        for part in load.parts:
            self._end(load, part)
        self.counters["tier_loads"] += bool(load.tokens)
        self.loaded_tokens.update(load.tokens)
        return True

    def _fill(self, load: Load, part: Part) -> None:
        """Take pages for the blocks that have come, and have these put there."""
        if len(part.found) < len(part.blocks):
            self._miss(part.blocks[len(part.found)].key)
        if (part.run.whole and len(part.found) < len(part.blocks)) or not self._make_room(load, part):
            part.found = []
            return
        jobs = []
        at = part.first_page - len(part.kept.pages)
        for block, loaded in zip(part.blocks, part.found, strict=False):
            stop = at + self._num_pages([block])
            if stop > 0:
                jobs.append((part.fresh.pages[max(at, 0) : stop], loaded.payload, max(-at, 0)))
            at = stop
        part.filling = self._filler.submit(self._put, jobs)
        part.filling.add_done_callback(self.tell)

    def _make_room(self, load: Load, part: Part) -> bool:
        """Lock what the tree has of a run, and take pages for what follows; False if there is nothing to be done."""
        cache = self._cache
        end = part.first_page + self._num_pages(part.blocks[: len(part.found)])
        match = cache.tree.match(part.run.tokens.tobytes()[: end * self._page_bytes], part.run.namespace)
        count = end - len(match.pages)
        if count <= 0 or len(match.pages) < part.first_page:  # computed by another, or evicted meanwhile
            return False
        held = sum(len(segment.pages) for segment in cache.held if segment.node is None)
        if held + count > self._pool.num_pages // 2:
            return self._give_up(part)
        node = cache.tree.lock_match(match)
        fresh = cache.allocate(count, match.pages, load.owner)
        if fresh is None:
            cache.tree.unlock(node)
            return self._give_up(part)
        part.kept, part.fresh = Segment(match.pages, 0, node=node), Segment(fresh, 0)
        cache.held += [part.kept, part.fresh]
        return True

    def _give_up(self, part: Part) -> bool:
        """For lack of pages: the run is computed, when there is room."""
        self._miss(part.blocks[0].key)
        return False

    def _put(self, jobs: list[tuple[array[int], memoryview, int]]) -> None:
        """Fill pages with payloads, without their first pages; on the filler's thread."""
        for pages, payload, skipped in jobs:
            self._pool.write_pages(pages, payload, skipped)

    def forget(self, node: Node) -> None:
        """Delete the blocks of a node's path and of all below it, as they may be damaged."""
        if not self.worker.names:
            return
        self._written.clear()
        below = [node]
        for above in below:
            below.extend(above.children.values())
        paths = [self._path_of(leaf) for leaf in below if not leaf.children]
        self.worker.delete(lambda: {block.key for one in paths for block in self._blocks(*one)})

    def _miss(self, key: BlockKey) -> None:
        _remember(self._absent, key, self._clock() + _ABSENT_S, _MOST_ABSENT)

    def _end(self, load: Load, part: Part) -> None:
        """Hand the blocks that have come to the tree, and free what was taken for others."""
        if part.filling is None:
            return
        cache = self._cache
        if part.filling.exception() is None and not load.is_void:
            pages = part.kept.pages + part.fresh.pages
            tokens = part.run.tokens.tobytes()[: len(pages) * self._page_bytes]
            cost = len(part.fresh.pages) * self._pool.page_size * self.token_s
            _, held = cache.insert(tokens, pages, part.run.namespace, cost, part.run.meta, load.owner)
            part.fresh.pages = array("i")
            at = part.first_page
            for block, loaded in zip(part.blocks, part.found, strict=False):
                begin, at = at, at + self._num_pages([block])
                self.keys.update(dict.fromkeys(held[begin:at], block.key))
                load.tokens[loaded.tier] = load.tokens.get(loaded.tier, 0) + len(block.tokens) // TOKEN_BYTES
        for segment in (part.kept, part.fresh):
            cache.held = [other for other in cache.held if other is not segment]
            cache.leave(segment)

    @property
    def token_s(self) -> float:
        """Seconds that computing a token takes; 0: not known yet."""
        return self._seconds / self._rows if self._rows else 0.0

    def computed(self, num_rows: int, seconds: float) -> None:
        """Take note of a step that has computed tokens of prompts. Older ones are forgotten."""
        self._rows = 0.9 * self._rows + num_rows
        self._seconds = 0.9 * self._seconds + seconds

    def settle(self, slots: Iterable[torch.Tensor]) -> None:
        """Return when these slots, int64, of the pool may be written."""
        if self._copies:
            pages = np.unique(np.concatenate([one.numpy() for one in slots]) // self._pool.page_size)
            self._copies.settle(pages.tolist())

    def state(self) -> dict[str, Any]:
        """Counters and gauges."""
        stats = self.worker.stats()
        by_tier = {name: self.loaded_tokens[name] for name in self.worker.names}
        return {
            **self.counters,
            "loaded_tokens_by_tier": by_tier,
            "tiers": stats["tiers"],
            "tier_writes_dropped": stats["dropped"],
        }

    def close(self) -> None:
        """Write what is queued, as far as the time allows, and close the stores."""
        self._filler.shutdown()
        self.worker.close(_CLOSE_S)

    # -- operators -------------------------------------------------------------------------------------------

    def erased(self, tenant: str | None) -> None:
        """Let loads under way bring nothing of a tenant, or nothing at all (None); forget what was written."""
        self._written.clear()
        for load in self.loads:
            load.is_void = load.is_void or any(tenant in (None, part.run.namespace.tenant) for part in load.parts)


def _remember(known: OrderedDict[BlockKey, Any], key: BlockKey, value: Any, most: int) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
