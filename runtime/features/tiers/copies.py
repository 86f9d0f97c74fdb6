"""Copies pages out of the pool, for the stores."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from runtime.features.tiers.block import TierBlock
from runtime.features.tiers.worker import TierWorker
from runtime.kv.pool import KVPool
from runtime.kv.side_stream import SideStream


@dataclass(slots=True, eq=False)
class Copy:
    """Pages of a block, copied on the device (`data`: uint8) or to main memory (`payload`); `lock`: while copying."""

    pages: array[int]
    lock: Lock = field(default_factory=Lock)
    data: torch.Tensor | None = None
    payload: memoryview | None = None


class Copies:
    """Copies pages in the worker's thread.

    A page may be freed and allocated again before it is copied. So each writer of pages calls `settle` first, which
    copies the pages that no thread has copied yet. A step thus waits only for pages that it writes, and a queued copy
    takes no memory. On a GPU or with several ranks, threads cannot copy pages: `add` copies them at once, on the device
    and in the order of its stream. From there, the thread copies them to main memory in a stream of its own.
    """

    def __init__(self, pool: KVPool, worker: TierWorker):
        self._pool, self._worker = pool, worker
        self._lock = Lock()
        self._by_page: dict[int, list[Copy]] = {}
        self._side = SideStream(pool.k.device)
        self._at_once = pool.k.device.type != "cpu" or pool.ranks > 1

    def __bool__(self) -> bool:
        """Whether pages are waiting to be copied."""
        return bool(self._by_page)

    def add(self, block: TierBlock, pages: array[int]) -> bool:
        """Queue a block for the stores; False if the worker has no room for it."""
        copy = Copy(pages)
        queue = partial(self._worker.write, block, partial(self._take, copy), len(pages) * self._pool.page_bytes)
        if self._at_once:
            with copy.lock:  # the thread waits for the copy
                accepted = queue()
                if accepted:
                    copy.data = self._pool.read_pages(pages)
            return accepted
        with self._lock:
            for page in pages:
                self._by_page.setdefault(page, []).append(copy)
        accepted = queue()
        if not accepted:
            self._forget(copy)
        return accepted

    def settle(self, pages: Iterable[int]) -> None:
        """Copy those of these pages that are waiting to be copied, so that all of them may be overwritten."""
        if not self._by_page:
            return
        with self._lock:
            copies = {copy for page in pages for copy in self._by_page.get(page, ())}
        for copy in copies:
            self._read(copy)

    def _take(self, copy: Copy) -> memoryview:
        """Return the payload of a copy, and drop the copy's own reference to it."""
        payload = self._read(copy)
        copy.data = copy.payload = None
        return payload

    def _read(self, copy: Copy) -> memoryview:
        with copy.lock:
            if copy.payload is None:
                data = self._pool.read_pages(copy.pages) if copy.data is None else copy.data
                copy.payload = self._side.download(data).data
                self._forget(copy)
            return copy.payload

    def _forget(self, copy: Copy) -> None:
        """Let the pages be overwritten."""
        with self._lock:
            for page in copy.pages:
                left = [other for other in self._by_page.pop(page, ()) if other is not copy]
                if left:
                    self._by_page[page] = left
