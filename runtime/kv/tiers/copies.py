"""Copies of pages on their way out of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from runtime.kv.pool import KVPool
from runtime.kv.tiers.block import Block, BlockKey, Frame
from runtime.kv.tiers.worker import TierWorker


@dataclass(slots=True, eq=False)
class Copy:
    """A block of pages; whoever copies them holds `lock`. `data`: uint8, a copy on the device; `frame`: one here."""

    block: Block
    pages: array[int]
    lock: Lock = field(default_factory=Lock)
    data: torch.Tensor | None = None
    frame: Frame | None = None


class Copies:
    """Has pages copied by a thread of the worker's.

    A page may be freed, and given to others, before it is copied: whoever writes into pages settles them first, and
    then copies those himself that nobody has copied yet. So no step waits for more than the pages that it writes, and
    a copy that waits takes no memory. Where a thread cannot do that (on a GPU, with several ranks), pages are copied
    at once, on the device and in the order of its stream.
    """

    def __init__(self, pool: KVPool, worker: TierWorker):
        self._pool, self._worker = pool, worker
        self._lock = Lock()
        self._waiting: set[BlockKey] = set()
        self._by_page: dict[int, list[Copy]] = {}
        self._at_once = pool.k.device.type != "cpu" or pool.ranks > 1

    def __bool__(self) -> bool:
        """Whether there are pages that have to be settled."""
        return bool(self._by_page)

    def add(self, block: Block, pages: array[int], reason: str) -> bool:
        """Have a block written; False if the worker has no room for it."""
        copy = Copy(block, pages)
        with self._lock:
            if block.key in self._waiting:
                return True
            self._waiting.add(block.key)
            if self._at_once:
                copy.data = self._pool.read_pages(pages)
            else:
                for page in pages:
                    self._by_page.setdefault(page, []).append(copy)
        done = partial(self._done, copy)
        if self._worker.write(block, partial(self._read, copy), len(pages) * self._pool.page_bytes, reason, done):
            return True
        done()
        return False

    def settle(self, pages: Iterable[int]) -> None:
        """Return when pages may be written: what was to be copied of them is copied."""
        if not self._by_page:
            return
        with self._lock:
            copies = {copy for page in pages for copy in self._by_page.get(page, ())}
        for copy in copies:
            self._read(copy)

    def _read(self, copy: Copy) -> Frame:
        with copy.lock:
            if copy.frame is None:
                copy.frame = self._worker.form.frame(copy.block, len(copy.pages) * self._pool.page_bytes)
                if copy.data is not None:
                    copy.frame.payload[:] = copy.data.cpu().flatten().numpy().data
                else:
                    self._pool.read_pages(copy.pages, copy.frame.payload)
                    self._forget(copy)
            return copy.frame

    def _forget(self, copy: Copy) -> None:
        """The pages may be written from now on."""
        with self._lock:
            for page in copy.pages:
                left = [other for other in self._by_page.pop(page, ()) if other is not copy]
                if left:
                    self._by_page[page] = left

    def _done(self, copy: Copy) -> None:
        with self._lock:
            self._waiting.discard(copy.block.key)
        self._forget(copy)
        copy.data = copy.frame = None
