"""Looks: passes before rows are chosen, over all rows in the first layer or over the question in all layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from runtime.batch import Read, RowSet, Stage, causal_visible
from runtime.execution.executor import Executor
from runtime.features.chunks.layout import Layout
from runtime.kv.segments import Sequence as Own
from runtime.kv.segments import slots_of
from runtime.models.rope import rotate

_NO_ROWS = np.zeros(0, dtype=np.int64)

# Approximate number of evenly spaced layers in which the attention of a question is measured.
_PROBED = 8
# Width of the mean by which A3 smooths its scores.
_POOLING = 5
# First and last rows of a chunk that do not count for its peak: they get attention whatever they say.
_EDGES = (4, 2)
# Most attention weights, over all heads, in memory at once: all weights of a long question would take gigabytes.
_MOST_WEIGHTS = 1 << 24


class Look(ABC):
    """A pass over a prompt, in chunks, before rows are chosen.

    Attributes:
        num_rows, done: number of rows of the pass, and how many of them are computed.
        writes_pages: whether the pass needs temporary pages for all rows after the exact prefix.
    """

    writes_pages: ClassVar[bool] = False

    def __init__(self, layout: Layout, sequence: Own, pages: array[int], executor: Executor):
        """`pages`: int32, the temporary pages; `sequence`: the request's sequence, which has only own rows so far."""
        self.layout, self.sequence, self.pages, self.executor = layout, sequence, pages, executor
        self.num_rows, self.done = self.length(layout), 0
        self._queries: list[list[torch.Tensor]] = []

    @staticmethod
    @abstractmethod
    def length(layout: Layout) -> int:
        """Number of rows of the pass."""

    @abstractmethod
    def rows(self, first: int, stop: int) -> RowSet:
        """Rows `first` to `stop` (exclusive) of the pass."""

    @abstractmethod
    def take(self, first: int, stop: int, saved: torch.Tensor | None) -> None:
        """Process the results of these rows. `saved`: the states that the step saved, float32 [n, hidden]."""

    def _project(self, layer: int, states: torch.Tensor, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of a layer for states [n, hidden], float32 [n, heads, head_dim] each."""
        spec = self.executor.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        return self.executor.own.project(layer, states, torch.from_numpy(positions)).split(heads, dim=1)


class DenseLook(Look):
    """Computes layer 0 of all rows after the exact prefix, and from its result the exact KV of layer 1."""

    writes_pages = True

    @staticmethod
    def length(layout: Layout) -> int:
        return len(layout.prompt) - layout.num_prefix

    def rows(self, first: int, stop: int) -> RowSet:
        layout, before = self.layout, self.layout.num_prefix
        part = slice(before + first, before + stop)
        positions = layout.positions[part]
        exact = layout.places[:1] if before else []
        reads = [read for place in exact for read in place.reads(positions, layout.page_size)]
        table = np.frombuffer(self.pages, dtype=np.int32)[: -(-stop // layout.page_size)]
        reads.append(Read(table, stop, visible=causal_visible(stop, stop - first)))
        writes = slots_of(self.pages, np.arange(first, stop), layout.page_size)
        return RowSet(
            tokens=layout.prompt[part].astype(np.int64),
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
        q, k, v = self._project(1, saved, self.layout.positions[before + first : before + stop])
        slots = torch.from_numpy(slots_of(self.pages, np.arange(first, stop), self.layout.page_size))
        pool.write(1, slots.to(pool.k.device), k, v)
        self._queries.append([q[max(self.layout.question - before - first, 0) :]])

    def read(self, positions: np.ndarray) -> Read:
        """A causal read of the temporary pages by rows at ascending positions, int64 [n]."""
        seen = np.searchsorted(self.layout.positions, positions, side="right") - self.layout.num_prefix
        table = np.frombuffer(self.pages, dtype=np.int32)[: -(-int(seen[-1]) // self.layout.page_size)]
        return Read(table, int(seen[-1]), visible=seen.astype(np.int32) if len(seen) > 1 else None)

    def queries(self) -> torch.Tensor:
        """Rotated queries of the question in layer 1, float32 [n, heads, head_dim]."""
        return torch.cat([several[0] for several in self._queries])

    def true(self, tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Keys (rotated) or values of layer 1 as full prefill computes them, float32 [n, kv_heads, head_dim].

        `tensor`: the pool's keys or values; `rows`: int64 [n], of the prompt.
        """
        return gather(tensor[1], self.pages, rows - self.layout.num_prefix, self.layout.page_size)

    def stored_values(self, rows: np.ndarray) -> torch.Tensor:
        """Cached values of layer 1, float32 [n, kv_heads, head_dim], of ascending rows of chunks, int64 [n]."""
        values, page_size = self.executor.pool.v[1], self.layout.page_size
        found = torch.zeros(len(rows), *values.shape[1:], device=values.device)
        for place in self.layout.places:
            mine = np.flatnonzero(np.isin(place.rows, rows)) if place.is_chunk else _NO_ROWS
            to = torch.from_numpy(np.searchsorted(rows, place.rows[mine])).to(values.device)
            found[to] = gather(values, place.pages, mine, page_size)
        return found


class QuestionLook(Look):
    """Computes own rows in all layers, over the stored rows of all chunks."""

    @staticmethod
    def length(layout: Layout) -> int:
        return int(layout.is_own.sum())

    def rows(self, first: int, stop: int) -> RowSet:
        layout, sequence = self.layout, self.sequence
        positions = sequence.positions(first, stop)
        table = np.frombuffer(sequence.pages, dtype=np.int32)[: -(-stop // layout.page_size)]
        reads = [Read(table, stop, visible=causal_visible(stop, stop - first))]
        reads += [read for place in layout.places for read in place.reads(positions, layout.page_size)]
        writes = sequence.slots(first, stop, layout.page_size)
        asking = np.flatnonzero(positions >= layout.positions[layout.question])
        probed = self._probed if len(asking) else ()
        cuts = [0, *probed, self.executor.spec.num_layers]
        return RowSet(
            tokens=np.array(sequence.tokens[first:stop], dtype=np.int64),
            positions=positions,
            stages=[
                Stage(range(*cut), writes, reads, save=asking if cut[1] in self._probed else None)
                for cut in pairwise(cuts)
            ],
            logits=_NO_ROWS,
        )

    @property
    def _probed(self) -> range:
        """The layers whose attention is measured."""
        num_layers = self.executor.spec.num_layers
        return range(1, num_layers, max((num_layers - 1) // _PROBED, 1))

    def take(self, first: int, stop: int, saved: torch.Tensor | None) -> None:
        if saved is None:
            return
        positions = self.sequence.positions(first, stop)
        asking = positions[positions >= self.layout.positions[self.layout.question]]
        states = zip(self._probed, saved.split(len(asking)), strict=True)
        self._queries.append([self._project(layer, one, asking)[0] for layer, one in states])

    def scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention of the question over probed layers, heads and rows, float32 [candidates] and [places].

        The mean to each candidate; and for each place the mean square of the largest weight in it, without its edges.
        """
        layout, page_size, places = self.layout, self.layout.page_size, self.layout.places
        layers = [torch.cat(runs) for runs in zip(*self._queries, strict=True)]
        pool, device, own = self.executor.pool.k, layers[0].device, self.sequence.positions(0, self.num_rows)
        read = [np.flatnonzero(place.kept) for place in places]
        slots = [self.sequence.slots(0, self.num_rows, page_size)]
        slots += [slots_of(place.pages, mine, page_size) for place, mine in zip(places, read, strict=True)]
        sizes, at = [*map(len, slots)], torch.from_numpy(np.concatenate(slots)).to(device)
        shifts = torch.tensor([-place.shift for place in places], device=device)
        turns = [*zip(*(part.split(1) for part in self.executor.own.rope.shift(shifts)), strict=True)]
        later = torch.from_numpy(own[None] > own[-len(layers[0]) :, None]).to(device)
        keys = (pool[layer][at].float().split(sizes) for layer in self._probed)
        found = [_attention(q, those, turns, later) for q, those in zip(layers, keys, strict=True)]
        weights, peaks = (torch.stack(several).mean(0) for several in zip(*found, strict=True))
        rows = np.concatenate([place.rows[mine] for place, mine in zip(places, read, strict=True)])
        by_row = torch.zeros(len(layout.prompt), device=device)  # it stays 0 for rows that no entry holds
        by_row[torch.from_numpy(rows).to(device)] = weights[len(own) :]
        return by_row[torch.from_numpy(layout.candidates).to(device)], peaks


def smooth(scores: torch.Tensor) -> torch.Tensor:
    """Moving average of scores, float32 [n]."""
    return F.avg_pool1d(scores[None], _POOLING, stride=1, padding=_POOLING // 2)[0]


def gather(tensor: torch.Tensor, pages: array[int], rows: np.ndarray, page_size: int) -> torch.Tensor:
    """Rows of one layer of the pool, float32 [n, kv_heads, head_dim]. `rows`: indices into the rows of `pages`."""
    return tensor[torch.from_numpy(slots_of(pages, rows, page_size)).to(tensor.device)].float()


def _attention(
    q: torch.Tensor, keys: Sequence[torch.Tensor], turns: Sequence[tuple[torch.Tensor, ...]], later: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one layer: mean attention to each row that is read, float32 [rows], and peaks, float32 [places].

    Args:
        q: rotated queries of the last n own rows, float32 [n, heads, head_dim].
        keys: of the own rows, then of each place, float32 [m, kv_heads, head_dim] each.
        turns: for each place, cos and sin that move queries to the positions at which it is encoded.
        later: bool [n, own rows], whether an own row comes after a query's.
    """
    sizes = [*map(len, keys)]
    weights, peaks = torch.zeros(sum(sizes), device=q.device), torch.zeros(len(turns), device=q.device)
    size = max(_MOST_WEIGHTS // (q.shape[1] * len(weights)), 1)
    for some, hidden in zip(q.split(size), later.split(size), strict=True):
        logits = [_logits(some, keys[0]).masked_fill_(hidden[:, None], -torch.inf)]
        logits += [_logits(rotate(some, *turn), those) for turn, those in zip(turns, keys[1:], strict=True)]
        attention = torch.cat(logits, dim=-1).softmax(dim=-1)
        weights += attention.sum((0, 1))
        for i, part in enumerate(attention.split(sizes, dim=-1)[1:]):
            if (inner := part[..., _EDGES[0] : -_EDGES[1]]).shape[-1]:
                peaks[i] += inner.amax(-1).square().sum()
    count = len(q) * q.shape[1]
    return weights / count, peaks / count


def _logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled products, float32 [n, heads, m], of queries [n, heads, head_dim] and keys [m, kv_heads, head_dim]."""
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    return torch.einsum("nkgd,mkd->nkgm", grouped, k).flatten(1, 2) / math.sqrt(q.shape[-1])
