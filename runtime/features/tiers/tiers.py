"""KV storage below the pool: stores blocks of the tree, and loads blocks for requests."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from cachetools import LRUCache, TTLCache

from radix import Namespace, Node, Stored, Watcher, path, text
from radix.hashes import block_hashes
from radix.namespace import APPROXIMATE
from radix.node import TOKEN_BYTES
from radix.stats import Cause
from runtime.calls import State
from runtime.features.tiers.block import HEAD_BYTES, ROOT, BlockKey, TierBlock
from runtime.features.tiers.copies import Copies
from runtime.features.tiers.loads import Load, RunLoad
from runtime.features.tiers.worker import TierWorker
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Run, Segment
from runtime.kv.side_stream import SideStream

log = logging.getLogger("ramet.engine")

# A block has at least this many bytes, or this many tokens if a model is small.
BLOCK_BYTES, MOST_TOKENS = 1 << 20, 64
# Approximate entries are never stored.
_APPROXIMATE = f"{APPROXIMATE}:"
# Time during which a missing block is not looked for again, and most such blocks to remember.
_ABSENT_S, _MOST_ABSENT = 2.0, 1 << 16
# Most blocks to remember that were written at their second use.
_MOST_WRITTEN = 1 << 16
# The shortest and the longest time for a load; between them, it may take as long as computing would.
_LEAST_S, _MOST_S = 0.25, 30.0
# Extra time after which requests stop waiting, in case a store hangs.
_GRACE_S = 0.5
# Time to write blocks when the engine ends, least time to close the stores, and time between two lines of progress.
CLOSE_S, _LEAST_CLOSE_S, _PROGRESS_S = 10.0, 1.0, 2.0
# Most bytes of all loads under way.
_MOST_BYTES = 1 << 30


class Tiers(Watcher):
    """Stores blocks that the tree evicts, or that are used a second time, and loads them again.

    Blocks begin at fixed multiples of tokens from the root of a namespace. An entry's last block may be shorter.

    Attributes:
        loads: the loads that have not ended.
        counters: counters of loads; `worker.states()` has those of the stores.
        loaded_tokens: number of loaded tokens by tier.
        keys: block keys by page, for pages of the tree whose blocks were written or loaded.
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
        self._copies, self._side = Copies(pool, worker), SideStream(pool.k.device)
        self._written: LRUCache[BlockKey, None] = LRUCache(_MOST_WRITTEN)
        self._absent: TTLCache[BlockKey, None] = TTLCache(_MOST_ABSENT, _ABSENT_S, clock)
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="kv-fill")
        self._news = threading.Event()
        self._erasing: list[tuple[str | None, Future[dict[str, int | None]]]] = []
        cache.tree.watch(self)
        cache.on_use, cache.on_distrust = self.used, self.forget
        pool.before_write = self._copies.settle

    # -- out -------------------------------------------------------------------------------------------------

    def leaving(self, node: Node, kept_pages: int, cause: Cause) -> None:
        """Store the blocks that end in evicted pages; flushed pages are not stored."""
        if cause != "flush":
            self._write(node, len(node.pages) - kept_pages, evicted=True)
        if self.keys:
            for page in node.pages[kept_pages:]:
                self.keys.pop(page, None)

    def used(self, node: Node) -> None:
        """Store the blocks of a path that are used for the second time."""
        self._write(node, sum(len(above.pages) for above in path(node) if above.hits == 1))

    def save_all(self, until: float) -> None:
        """Write the whole tree to the disk, the most used nodes first, within its space and until a time on the clock.

        Logs progress, and what is not written.
        """
        told = self._clock() + _PROGRESS_S
        self.worker.detach("host")  # it ends with this process
        size, left = self._pool.page_size, self.worker.capacity("disk") or 0
        offered: dict[BlockKey, array[int]] = {}
        nodes = sorted(self._cache.tree.nodes(), key=lambda node: (node.hits, node.last_use), reverse=True)
        kept = (node for node in nodes if not (node.is_attached or node.namespace.entry.startswith(_APPROXIMATE)))
        own = {page for node in kept for page in node.pages}
        for block, pages in (ending for node in nodes for ending in self._ending(node, len(node.pages))):
            left -= len(pages) * self._pool.page_bytes + HEAD_BYTES
            if left < 0 or not self.worker.wait_for_room(len(pages) * self._pool.page_bytes, until):
                break
            self._copies.add(block, pages)
            offered[block.key] = pages
            if self._clock() > told:
                told += _PROGRESS_S
                log.info("writing the cache to the disk: %d blocks of %d tokens", len(offered), len(own) * size)
        self.worker.drain(max(until - self._clock(), 0))
        there = zip(offered.values(), self.worker.where([*offered]).result(), strict=True)
        lost = len(own.difference(page for pages, names in there if "disk" in names for page in pages)) * size
        why = "no space is left" if left < 0 else "no time is left" if self._clock() >= until else "they fill no block"
        told_lost, total = f"; {lost} are not written: {why}" if lost else "", len(own) * size
        log.info("the disk holds %d of %d cached tokens%s", total - lost, total, told_lost)

    def _write(self, node: Node, num_pages: int, evicted: bool = False) -> None:
        """Store the blocks that end in the last `num_pages` pages of a path."""
        for block, own in self._ending(node, num_pages):
            if evicted or block.key not in self._written:
                accepted = self._copies.add(block, own)
                self._absent.pop(block.key, None)
                if accepted and not evicted:
                    self._written[block.key] = None
            if not evicted:
                self.keys.update(dict.fromkeys(own, block.key))

    def _ending(self, node: Node, num_pages: int) -> Iterator[tuple[TierBlock, array[int]]]:
        """The blocks that end in the last `num_pages` pages of a path, with their pages."""
        if not num_pages or node.namespace.entry.startswith(_APPROXIMATE):
            return
        size, end = self.block_pages, sum(len(above.pages) for above in path(node))
        is_end = node.meta is not None and node.meta.tokens <= end * self._pool.page_size
        first = (end - num_pages) // size
        last = -(-end // size) if is_end else end // size
        if first >= last:
            return
        nodes = list(path(node))[::-1]
        pages = array("i", b"".join(above.pages.tobytes() for above in nodes))
        blocks = self._blocks(b"".join(above.key for above in nodes), node.namespace, is_end)
        for number in range(first, last):
            yield blocks[number], pages[number * size : (number + 1) * size]

    def _blocks(self, tokens: bytes, namespace: Namespace, is_entry: bool) -> list[TierBlock]:
        """The blocks of a run from its root on. Those of an entry include the last block, which may be shorter."""
        size = self.block_pages * self._page_bytes
        form = self.worker.form
        blocks = list(form.chain(namespace, tokens, size))
        if is_entry and (rest := tokens[len(blocks) * size :]):
            key = form.key(blocks[-1].key if blocks else ROOT, namespace, rest)
            blocks.append(TierBlock(key, namespace, rest))
        if self._cache.events is not None:
            hashes = block_hashes(tokens, self._page_bytes, None, namespace)
            for number, block in enumerate(blocks):
                if len(text(block.tokens)) < len(block.tokens):  # an attached run
                    break
                at = number * self.block_pages
                own, parent = hashes[at : at + self.block_pages], hashes[at - 1] if at else None
                blocks[number] = block._replace(event=Stored(own, parent, block.tokens, namespace))
        return blocks

    # -- in --------------------------------------------------------------------------------------------------

    def ask(self, runs: Iterable[Run], owner: Namespace) -> Load | None:
        """The load for which a request that reads `runs` should wait; None if there is nothing to load."""
        parts, joined = [], None
        for run in runs:
            part = None if self._is_erased(run.namespace.tenant) else self._missing(run)
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

    def _is_erased(self, tenant: str) -> bool:
        return any(erased in (None, tenant) and not done.done() for erased, done in self._erasing)

    def _missing(self, run: Run) -> RunLoad | None:
        """The blocks after the cached part of a run; None if there are none, or the stores just lacked the first."""
        if run.namespace.entry.startswith(_APPROXIMATE):
            return None
        tokens = run.tokens.tobytes()
        whole = len(tokens) // self._page_bytes
        has = len(self._cache.tree.match(tokens, run.namespace).pages)
        if has >= (whole if run.meta is not None else whole // self.block_pages * self.block_pages):
            return None
        first = has // self.block_pages
        blocks = self._blocks(tokens, run.namespace, run.meta is not None)[first:]
        if blocks[0].key in self._absent:
            return None
        return RunLoad(run, first * self.block_pages, blocks)

    def _num_pages(self, blocks: Iterable[TierBlock]) -> int:
        return sum(len(block.tokens) for block in blocks) // self._page_bytes

    def _bringing(self, key: BlockKey) -> Load | None:
        mine = (load for load in self.loads for part in load.parts for block in part.blocks if block.key == key)
        return next(mine, None)

    def _start(self) -> None:
        """Begin loads in the order of `ask`, as many as memory allows."""
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

    def tell(self, _: object) -> None:
        """Wake `wait`, because a future is done."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Wait for progress of a load, at most some seconds."""
        self._news.wait(seconds)

    def poll(self, patience_s: float = 0.0) -> list[Load]:
        """Advance the loads; returns those that have ended, with their blocks in the tree.

        `patience_s`: seconds to wait for the latest load, counted from its `ask`.
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
        """Advance a load; True once it has ended."""
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

    def _fill(self, load: Load, part: RunLoad) -> None:
        """Allocate pages for the blocks that were found, and fill the pages in the filler's thread."""
        if len(part.found) < len(part.blocks):
            self._absent[part.blocks[len(part.found)].key] = None
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

    def _make_room(self, load: Load, part: RunLoad) -> bool:
        """Lock the cached part of a run, and allocate pages for the blocks after it.

        False if the blocks are no longer needed, or if pages are scarce; then the run is computed.
        """
        cache = self._cache
        end = part.first_page + self._num_pages(part.blocks[: len(part.found)])
        match = cache.tree.match(part.run.tokens.tobytes()[: end * self._page_bytes], part.run.namespace)
        count = end - len(match.pages)
        if count <= 0 or len(match.pages) < part.first_page:  # computed by another request, or evicted meanwhile
            return False
        held = sum(len(segment.pages) for segment in cache.held if segment.node is None)
        node = cache.tree.lock_match(match)
        fits = held + count <= self._pool.num_pages // 2
        fresh = cache.allocate(count, match.pages, load.owner) if fits else None
        if fresh is None:
            cache.tree.unlock(node)
            self._absent[part.blocks[0].key] = None
            return False
        part.kept, part.fresh = Segment(match.pages, 0, node=node), Segment(fresh, 0)
        cache.held += [part.kept, part.fresh]
        return True

    def _put(self, jobs: list[tuple[array[int], memoryview, int]]) -> None:
        """Fill pages with payloads, leaving out the first `skipped` pages of each."""
        with self._side.behind_steps():
            for pages, payload, skipped in jobs:
                self._pool.write_pages(pages, payload, skipped)

    def forget(self, node: Node) -> None:
        """Delete the stored blocks of a node's path and of everything below it: they may be damaged."""
        self._written.clear()
        runs, below = [], [node]
        for above in below:
            below.extend(above.children.values())
            if not above.children:
                tokens = b"".join(part.key for part in reversed(list(path(above))))
                runs.append((tokens, above.namespace, above.meta is not None))
        self.worker.delete(lambda: {block.key for run in runs for block in self._blocks(*run)})

    def _end(self, load: Load, part: RunLoad) -> None:
        """Insert the loaded blocks in the tree, and release everything else."""
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
                load.tokens[loaded.tier] = load.tokens.get(loaded.tier, 0) + len(text(block.tokens)) // TOKEN_BYTES
        for segment in (part.kept, part.fresh):
            cache.held = [other for other in cache.held if other is not segment]
            cache.leave(segment)

    @property
    def token_s(self) -> float:
        """Measured seconds to compute a token; 0: unknown."""
        return self._seconds / self._rows if self._rows else 0.0

    def computed(self, num_rows: int, seconds: float) -> None:
        """Update `token_s` with a step that has computed prompt tokens; the weight of earlier steps decays."""
        self._rows = 0.9 * self._rows + num_rows
        self._seconds = 0.9 * self._seconds + seconds

    def settle(self, slots: Iterable[torch.Tensor]) -> None:
        """Copy pages that are waiting to be copied, before a step overwrites `slots` (int64) of the pool."""
        if self._copies:
            pages = np.unique(np.concatenate([one.numpy() for one in slots]) // self._pool.page_size)
            self._copies.settle(pages.tolist())

    def report(self, state: State) -> None:
        """Add counters and gauges."""
        state.tiers |= self.worker.states()
        state.figures |= {**self.counters, "tier_writes_dropped": self.worker.num_dropped}
        state.labelled["loaded_tokens_by_tier"] = {name: self.loaded_tokens[name] for name in self.worker.names}

    def close(self, until: float) -> None:
        """Write queued blocks until a time on the clock, and close the stores, which gets a second in any case."""
        self._filler.shutdown()
        self.worker.close(max(until - self._clock(), _LEAST_CLOSE_S))

    def erased(self, tenant: str | None, done: Future[dict[str, int | None]]) -> None:
        """Void the loads of an erased tenant, or all loads (None), and forget what was written.

        Until the erasure is `done`, the stores may still have blocks of the tenant, and no new load begins.
        """
        self._erasing = [one for one in self._erasing if not one[1].done()]
        self._erasing.append((tenant, done))
        self._written.clear()
        for load in self.loads:
            load.is_void = load.is_void or any(tenant in (None, part.run.namespace.tenant) for part in load.parts)
