"""The tensors of all layers' keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch


class KVPool:
    """Keys and values of all layers in pages.

    Attributes:
        k, v: [layers, num_pages * page_size, kv_heads, head_dim]; row `page * page_size + r` is row r of a page. Keys
            are stored rotated for the position at which they were computed.
        on_copy: called with the arguments of `copy_rows`, for pools elsewhere that hold the other heads of these pages.
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
    ):
        """`spare_pages`: extra pages at the end, for rows that are never read."""
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, (num_pages + spare_pages) * page_size, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.on_copy: Callable[[int, int, int], None] | None = None

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of K and V that one token takes over all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new rows: `slots` int64 [T], `k` and `v` [T, kv_heads, head_dim], in the pool's dtype from then on."""
        for pool, rows in ((self.k[layer], k), (self.v[layer], v)):
            rows = rows.to(pool.dtype)
            if pool.dtype.itemsize == 1:  # float8 has no index_copy_
                pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
            pool.index_copy_(0, slots, rows)

    def copy_rows(self, source_page: int, target_page: int, rows: int) -> None:
        """Copy the first `rows` rows of a page into another, in all layers (copy on write)."""
        if self.on_copy is not None:
            self.on_copy(source_page, target_page, rows)
        source, target = source_page * self.page_size, target_page * self.page_size
        for tensor in (self.k, self.v):
            tensor[:, target : target + rows] = tensor[:, source : source + rows]
