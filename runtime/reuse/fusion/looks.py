"""Passes over a prompt before its rows are chosen: of all rows in the first layer, or of the question in all layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import torch

from runtime.batch import causal_visible
from runtime.execution.executor import Executor
from runtime.models.rope import rotate
from runtime.request import Sequence, slots_of
from runtime.reuse.build import Read, RowSet, Stage
from runtime.reuse.fusion.layout import Layout, Place

_NO_ROWS = np.zeros(0, dtype=np.int64)


class Look(ABC):
    """A pass in chunks.

    Attributes:
        num_rows, done: rows to be computed, and how many are.
        writes_pages: whether it takes pages of its own for all rows behind the exact prefix.
    """

    writes_pages: ClassVar[bool] = False

    def __init__(self, layout: Layout, sequence: Sequence, pages: array[int], executor: Executor):
        """`pages`: int32, its own; `sequence`: the request's, of own rows alone."""
        self.layout, self.sequence, self.pages, self.executor = layout, sequence, pages, executor
        self.num_rows, self.done = self.length(layout), 0
        self._queries: list[list[torch.Tensor]] = []

    @staticmethod
    @abstractmethod
    def length(layout: Layout) -> int:
        """Rows that it computes."""

    @abstractmethod
    def rows(self, first: int, stop: int) -> RowSet:
        """Some of its rows."""

    @abstractmethod
    def take(self, first: int, stop: int, saved: torch.Tensor | None) -> None:
        """Take what some of its rows gave."""

    def _gather(self, tensor: torch.Tensor, pages: array[int], rows: np.ndarray) -> torch.Tensor:
        """float32 rows [n, kv_heads, head_dim] of a layer of the pool."""
        slots = torch.from_numpy(slots_of(pages, rows, self.layout.page_size)).to(tensor.device)
        return tensor[slots].float()

    def _project(self, layer: int, states: torch.Tensor, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Queries, keys, values, float32 [n, heads, head_dim]."""
        spec = self.executor.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        return self.executor.project(layer, states, torch.from_numpy(positions)).split(heads, dim=1)


class DenseLook(Look):
    """Layer 0 of all rows behind the exact prefix, which is exact, and what they give as keys and values of layer 1."""

    writes_pages = True

    @staticmethod
    def length(layout: Layout) -> int:
        return len(layout.prompt) - layout.num_prefix

    def rows(self, first: int, stop: int) -> RowSet:
        layout, before = self.layout, self.layout.num_prefix
        positions = np.arange(before + first, before + stop)
        exact = layout.places[:1] if before else []
        reads = [read for place in exact for read in place.reads(positions, layout.page_size)]
        table = np.frombuffer(self.pages, dtype=np.int32)[: -(-stop // layout.page_size)]
        reads.append(Read(table, stop, visible=causal_visible(stop, stop - first)))
        writes = slots_of(self.pages, np.arange(first, stop), layout.page_size)
        return RowSet(
            tokens=layout.prompt[positions].astype(np.int64),
            positions=positions,
            stages=[
                Stage(range(1), writes, reads, save=np.arange(stop - first)),
                Stage(range(1, self.executor.spec.num_layers), _NO_ROWS, [], alive=_NO_ROWS),
            ],
            logits=_NO_ROWS,
        )

    def take(self, first: int, stop: int, saved: torch.Tensor | None) -> None:
        assert saved is not None
        before, pool = self.layout.num_prefix, self.executor.pool
        q, k, v = self._project(1, saved, np.arange(before + first, before + stop))
        slots = torch.from_numpy(slots_of(self.pages, np.arange(first, stop), self.layout.page_size))
        pool.write(1, slots.to(pool.k.device), k, v)
        self._queries.append([q[max(self.layout.question - before - first, 0) :]])

    def read(self, positions: np.ndarray) -> Read:
        """Of these pages, rows at ascending positions read all rows up to their own."""
        seen = positions - self.layout.num_prefix + 1
        table = np.frombuffer(self.pages, dtype=np.int32)[: -(-int(seen[-1]) // self.layout.page_size)]
        return Read(table, int(seen[-1]), visible=seen.astype(np.int32) if len(seen) > 1 else None)

    def queries(self) -> torch.Tensor:
        """The question's, of layer 1: float32 [n, heads, head_dim], rotated."""
        return torch.cat([several[0] for several in self._queries])

    def true_keys(self, rows: np.ndarray) -> torch.Tensor:
        """Keys of layer 1 that full prefill gives, float32 [n, kv_heads, head_dim], rotated for the rows' positions."""
        return self._gather(self.executor.pool.k[1], self.pages, rows - self.layout.num_prefix)

    def true_values(self, rows: np.ndarray) -> torch.Tensor:
        """Values of layer 1 that full prefill gives, float32 [n, kv_heads, head_dim]."""
        return self._gather(self.executor.pool.v[1], self.pages, rows - self.layout.num_prefix)

    def stored_values(self, rows: np.ndarray) -> torch.Tensor:
        """Values of layer 1 in the chunks, float32 [n, kv_heads, head_dim]; `rows`: of documents, ascending."""
        return torch.cat(
            [
                self._gather(self.executor.pool.v[1], place.pages, mine - place.start)
                for place, mine in _by_place(self.layout.places, rows)
            ]
        )


class QuestionLook(Look):
    """Own rows in all layers, behind the stored rows of all documents."""

    @staticmethod
    def length(layout: Layout) -> int:
        return int(layout.is_own.sum())

    def rows(self, first: int, stop: int) -> RowSet:
        layout, sequence, num_layers = self.layout, self.sequence, self.executor.spec.num_layers
        positions = sequence.positions(first, stop)
        table = np.frombuffer(sequence.pages, dtype=np.int32)[: -(-stop // layout.page_size)]
        reads = [Read(table, stop, visible=causal_visible(stop, stop - first))]
        reads += [read for place in layout.places for read in place.reads(positions, layout.page_size)]
        writes = sequence.slots(first, stop, layout.page_size)
        save = np.flatnonzero(positions >= layout.question)
        return RowSet(
            tokens=np.array(sequence.tokens[first:stop], dtype=np.int64),
            positions=positions,
            stages=[
                Stage(range(i, i + 1), writes, reads, save=save if i + 1 < num_layers and len(save) else None)
                for i in range(num_layers)
            ],
            logits=_NO_ROWS,
        )

    def take(self, first: int, stop: int, saved: torch.Tensor | None) -> None:
        if saved is None:
            return
        positions = self.sequence.positions(first, stop)
        positions = positions[positions >= self.layout.question]
        layers = enumerate(saved.split(len(positions)), start=1)
        self._queries.append([self._project(layer, states, positions)[0] for layer, states in layers])

    def attention(self) -> torch.Tensor:
        """Attention to each candidate, float32 [candidates]: the mean over layers from 1 on, heads and the question."""
        layers = [torch.cat(several) for several in zip(*self._queries, strict=True)]
        total = torch.stack([self._layer_attention(layer, q) for layer, q in enumerate(layers, start=1)])
        return total.mean(0)

    def _layer_attention(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        layout, sequence, pool = self.layout, self.sequence, self.executor.pool
        own = sequence.positions(0, self.num_rows)
        keys = self._gather(pool.k[layer], sequence.pages, np.arange(self.num_rows))
        logits = [_logits(q, keys)]
        later = torch.from_numpy(own[None] > own[-len(q) :, None]).to(q.device)
        logits[0].masked_fill_(later[:, None], -torch.inf)
        rows = [own]
        for place in layout.places:
            mine = np.flatnonzero(place.kept)
            turned = q
            if place.shift:
                turned = rotate(q, *self.executor.rope.shift(torch.tensor([-place.shift], device=q.device)))
            logits.append(_logits(turned, self._gather(pool.k[layer], place.pages, mine)))
            rows.append(place.start + mine)
        attention = torch.cat(logits, dim=-1).softmax(dim=-1).mean((0, 1))
        by_row = torch.zeros(len(layout.prompt), device=q.device)
        by_row[torch.from_numpy(np.concatenate(rows)).to(q.device)] = attention
        return by_row[torch.from_numpy(layout.candidates).to(q.device)]


def _logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """float32 [n, heads, m] of queries [n, heads, head_dim] and keys [m, kv_heads, head_dim]."""
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    return torch.einsum("nkgd,mkd->nkgm", grouped, k).flatten(1, 2) / math.sqrt(q.shape[-1])


def _by_place(places: Iterable[Place], rows: np.ndarray) -> Iterable[tuple[Place, np.ndarray]]:
    """The documents' places, and the ascending rows of the prompt that lie in each."""
    for place in places:
        first, last = np.searchsorted(rows, (place.start, place.start + place.entry.length))
        if place.is_document and first < last:
            yield place, rows[first:last]
