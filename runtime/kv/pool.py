"""The tensors of all layers' keys and values."""

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch


class OtherPools(Protocol):
    """The pools of the other ranks, which repeat what this pool does."""

    def copy_rows(self, source_page: int, target_page: int, rows: int) -> None: ...

    def gather(self, pages: Sequence[int], mine: torch.Tensor) -> torch.Tensor:
        """`KVPool.read_pages` of all ranks in order, on this rank's device; `mine`: this rank's tensor."""

    def scatter(self, pages: Sequence[int], theirs: Sequence[np.ndarray]) -> None:
        """Fill pages of the other ranks, each with its array; any thread may call it."""


class KVPool:
    """Keys and values of all layers in pages.

    Attributes:
        k, v: [layers, num_pages * page_size, kv_heads, head_dim]; row `page * page_size + r` is row r of a page. Keys
            are stored rotated for the position at which they were computed. With latent attention, v is k.
        before_write: called in any thread before pages are written, with the page ids.
        others: pools of other ranks, which hold the other heads of these pages.
        ranks: number of pools, including this one.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        spare_pages: int = 0,
        halves: int = 2,
    ):
        """`spare_pages`: extra pages at the end, for rows that are never read. `halves`: 1 if values are the keys."""
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, (num_pages + spare_pages) * page_size, num_kv_heads, head_dim)
        self.k = zeros(shape, dtype, device)
        self.v = self.k if halves == 1 else zeros(shape, dtype, device)
        self._halves = (self.k, self.v)[:halves]
        self.before_write: Callable[[Iterable[int]], None] | None = None
        self.others: OtherPools | None = None
        self.ranks = 1
        self._pages = [t.view(torch.uint8).view(num_layers, num_pages + spare_pages, -1) for t in self._halves]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's K and V over all layers and ranks."""
        return self.ranks * sum(half.shape[0] * half.shape[2] for half in self._pages)

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, halves: int = 2) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return halves * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new rows: `slots` int64 [T], `k` and `v` [T, kv_heads, head_dim], converted to the pool's dtype.

        Values outside of the dtype's range become its largest ones.
        """
        for half, rows in zip(self._halves, (k, v), strict=False):
            if half.dtype.itemsize == 1:  # a cast to float8 makes NaN of what is too large
                most = torch.finfo(half.dtype).max
                rows = rows.clamp(-most, most)
            pool, rows = half[layer], rows.to(half.dtype)
            if pool.dtype.itemsize == 1:  # float8 has no index_copy_
                pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
            pool.index_copy_(0, slots, rows)

    def copy_rows(self, source_page: int, target_page: int, rows: int) -> None:
        """Copy the first `rows` rows of a page into another, in all layers (copy on write)."""
        if self.others is not None:
            self.others.copy_rows(source_page, target_page, rows)
        if self.before_write is not None:
            self.before_write((target_page,))
        source, target = source_page * self.page_size, target_page * self.page_size
        for tensor in self._halves:
            tensor[:, target : target + rows] = tensor[:, source : source + rows]

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of pages, uint8 [halves * ranks, layers, pages, bytes], on the pool's device."""
        shape = (len(self._pages), len(self._pages[0]), len(pages), self._pages[0].shape[2])
        found = torch.empty(shape, dtype=torch.uint8, device=self.k.device)
        on_host = self.k.device.type == "cpu"
        for half, own in zip(found, self._pages, strict=True):
            # numpy copies on the host: threads of torch would spin on the cores that the kernels use.
            target, source = (half.numpy(), own.numpy()) if on_host else (half, own)
            for at, first, stop in _runs(pages):
                target[:, at : at + stop - first] = source[:, first:stop]
        return found if self.others is None else self.others.gather(pages, found)

    def write_pages(self, pages: Sequence[int], data: memoryview | np.ndarray | torch.Tensor, skipped: int = 0) -> None:
        """Fill pages with bytes of `read_pages`, which begin with `skipped` other pages. A tensor is this rank's.

        Raises ValueError if the number of bytes is wrong.
        """
        if self.before_write is not None:
            self.before_write(pages)
        shape = (self.ranks, len(self._pages), len(self._pages[0]), skipped + len(pages), self._pages[0].shape[2])
        on_host = self.k.device.type == "cpu"
        if isinstance(data, torch.Tensor):
            mine = (data.numpy() if on_host else data).reshape(shape)[0, :, :, skipped:]
        else:
            mine, *theirs = np.frombuffer(data, dtype=np.uint8).reshape(shape)[:, :, :, skipped:]
            if self.others is not None:
                self.others.scatter(pages, theirs)
            mine = mine if on_host else _upload(mine, self.k.device)
        for half, own in zip(mine, self._pages, strict=True):
            target = own.numpy() if on_host else own
            for at, first, stop in _runs(pages):
                target[:, first:stop] = half[:, at : at + stop - first]


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive pages: (index in `pages` of the first page, first page, last page + 1)."""
    at = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            yield at, pages[at], pages[place - 1] + 1
            at = place


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. In main memory, they take no time and no memory until they are first used."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy bytes, which may be read-only, to a GPU through pinned memory; does not wait for the device."""
    pinned = torch.empty(array.shape, dtype=torch.uint8, pin_memory=True)
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)
