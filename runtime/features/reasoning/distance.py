"""Distances between pages over all layers and heads (ReasonCache, section IV-A2)."""

from dataclasses import dataclass

import torch

from runtime.kv.pool import KVPool

# Most elements of one operation. On a CPU, torch uses more threads from 32,768 elements on; the engine needs these.
_MOST_ON_CPU, _MOST = 32_767, 1 << 24


@dataclass(slots=True)
class MeasuredPage:
    """A full page.

    Attributes:
        id: page id in the pool.
        squares: float32 [2, layers], squared norms of its keys and values; None: not computed yet.
    """

    id: int
    squares: torch.Tensor | None = None


class Distances:
    """Measures the distance of two pages of a pool.

    D = mean over layers of (|K - K'| + |V - V'|) / (rows of a page x KV heads), with Euclidean norms in float32. The
    norms use |x - y|^2 = |x|^2 + |y|^2 - 2 x.y, so the squares of each page are computed only once.
    """

    def __init__(self, pool: KVPool):
        self._pool = pool
        self._num_layers, self._num_heads = pool.k.shape[0], pool.k.shape[2]
        most = _MOST_ON_CPU if pool.k.device.type == "cpu" else _MOST
        per_layer = pool.page_size * self._num_heads * pool.k.shape[3]
        self._layers = max(most // per_layer, 1)
        # A separate stream, so that no step waits. It needs no synchronisation: finished steps wrote all full pages.
        self._stream = torch.cuda.Stream(pool.k.device) if pool.k.is_cuda else None

    @torch.inference_mode()
    def between(self, a: MeasuredPage, b: MeasuredPage) -> float:
        with torch.cuda.stream(self._stream):
            squares = self._squares(a) + self._squares(b) - 2 * self._dots(a, b)
            total = squares.clamp_min(0).sqrt().sum().item()
        return total / (self._num_layers * self._pool.page_size * self._num_heads)

    def _squares(self, page: MeasuredPage) -> torch.Tensor:
        if page.squares is None:
            page.squares = self._dots(page, page)
        return page.squares

    def _dots(self, a: MeasuredPage, b: MeasuredPage) -> torch.Tensor:
        """Scalar products of the keys and of the values of two pages, float32 [2, layers]."""
        found = []
        for first in range(0, self._num_layers, self._layers):
            pairs = zip(self._rows(a, first), self._rows(b, first), strict=True)
            found.append(torch.stack([(mine * other).sum((1, 2, 3)) for mine, other in pairs]))
        return torch.cat(found, 1)

    def _rows(self, page: MeasuredPage, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, float32 [layers, rows, heads, dim] each, of `self._layers` layers from `first` on."""
        pool, start = self._pool, page.id * self._pool.page_size
        place = slice(first, first + self._layers), slice(start, start + pool.page_size)
        return pool.k[place].float(), pool.v[place].float()
