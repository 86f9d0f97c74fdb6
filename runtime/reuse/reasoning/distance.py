"""Distances between pages over all layers and heads (ReasonCache, section IV-A2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate

# Elements of an operation. On a CPU torch begins with 32,768 to wake other threads, which the engine's steps need.
_MOST_ON_CPU, _MOST = 32_767, 1 << 24


@dataclass(slots=True)
class Page:
    """A sealed page.

    Attributes:
        id: in the pool.
        position: of its first row, when its keys were computed.
        squares: float32 [2, layers], squared norms of its keys and values; None: not measured yet.
    """

    id: int
    position: int
    squares: torch.Tensor | None = None


class Distances:
    """Measures pages of a pool.

    D = mean over layers of (|K - K'| + |V - V'|) / (rows of a page x KV heads), Euclidean norms in float32, by
    |x - y|^2 = |x|^2 + |y|^2 - 2 x.y, where the squares are those that the pages know.
    """

    def __init__(self, pool: KVPool, rope: RotaryEmbedding):
        self._pool, self._rope = pool, rope
        self._num_layers, self._num_heads = pool.k.shape[0], pool.k.shape[2]
        most = _MOST_ON_CPU if pool.k.device.type == "cpu" else _MOST
        per_layer = pool.page_size * self._num_heads * pool.k.shape[3]
        self._layers = max(most // per_layer, 1)
        # Beside the steps, not between their kernels. Sealed rows were written by steps that have been read.
        self._stream = torch.cuda.Stream(pool.k.device) if pool.k.is_cuda else None

    @torch.inference_mode()
    def between(self, a: Page, b: Page, moved: bool = False) -> float:
        """The distance of two pages; `moved`: of their keys without their rotations."""
        with torch.cuda.stream(self._stream):
            dots = self._dots(a, b, a.position - b.position if moved else 0)
            squares = self._squares(a) + self._squares(b) - 2 * dots
            total = squares.clamp_min(0).sqrt().sum().item()
        return total / (self._num_layers * self._pool.page_size * self._num_heads)

    def _squares(self, page: Page) -> torch.Tensor:
        if page.squares is None:
            page.squares = self._dots(page, page, 0)
        return page.squares

    def _dots(self, a: Page, b: Page, move: int) -> torch.Tensor:
        """Scalar products float32 [2, layers] of keys and of values, those of `b` moved by so many positions.

        Both pages' rows stand at consecutive positions: a rotation by what lies between them undoes both.
        """
        found = []
        for first in range(0, self._num_layers, self._layers):
            k, v = self._rows(a, first)
            other_k, other_v = self._rows(b, first)
            if move:
                cos_sin = self._rope.shift(torch.tensor([move], device=k.device))
                other_k = rotate(other_k.flatten(0, 1), *cos_sin).view_as(k)
            found.append(torch.stack([(k * other_k).sum((1, 2, 3)), (v * other_v).sum((1, 2, 3))]))
        return torch.cat(found, 1)

    def _rows(self, page: Page, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values float32 [layers, rows, heads, dim] of some layers."""
        pool, start = self._pool, page.id * self._pool.page_size
        place = slice(first, first + self._layers), slice(start, start + pool.page_size)
        return pool.k[place].float(), pool.v[place].float()
