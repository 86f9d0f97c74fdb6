"""Attention in torch on a GPU: the edges of a step in a few calls of fused kernels, over gathered KV."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge, rows_of
from runtime.execution.attention.paged_index import (
    first_row,
    is_causal,
    merge_table,
    visible_of,
    visible_pairs,
)
from runtime.execution.attention.torch_attention import PLAIN, Scores, TorchAttention
from runtime.execution.attention.varlen import Kernel, Sequences, by_sequence, choose_kernel
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate

# Most bytes of K and V that a call gathers.
_GATHERED_BYTES = 512 << 20
# As many bytes of reads must be saved per layer by reading shared pages once, which costs further calls and a merge.
_MERGE_BYTES = 32 << 20


@dataclass(slots=True)
class FusedPart:
    """Query rows that see a range of a span, before parts are put into calls.

    Attributes:
        kind: `single` (one row), `causal`, `full`, or `masked`; parts of a kind form calls.
        rows: int64 [n], rows of the layer group.
        slots: int64 [m], pool rows.
        shift: shift of the span.
        mask: bool [n, m], if the kind is `masked`.
    """

    kind: str
    rows: np.ndarray
    slots: np.ndarray
    shift: int
    mask: torch.Tensor | None = None


@dataclass(slots=True)
class FusedCall:
    """One call of a kernel.

    Attributes:
        rows: query rows, as rows of the layer group; None: all rows in order.
        slots: int32 [keys], pool rows.
        cos_sin: rotation of the queries by the shifts of their spans; None: no rotation.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None
    sequences: Sequences


@dataclass(slots=True)
class FusedCalls:
    """The calls of a layer group. `table`: int64 [rows, n], see `merge_table`; None: one call for all rows in order."""

    calls: list[FusedCall]
    table: torch.Tensor | None


class FusedAttention(TorchAttention):
    """The torch backend on a GPU. A step of decode rows that share nothing is one call in each layer."""

    def __init__(self, pool: KVPool, rope: RotaryEmbedding | None = None, scores: Sequence[Scores] = ()):
        super().__init__(pool, rope, scores)
        row_bytes = 2 * pool.k[0, 0].numel() * pool.k.dtype.itemsize
        self._most_keys = max(1, _GATHERED_BYTES // row_bytes)
        self.least_saved_tokens = max(1, _MERGE_BYTES // row_bytes)
        self._kernels: dict[tuple[torch.dtype, int, int, int], Kernel] = {}

    def prepare(self, plan: AttentionPlan) -> FusedCalls:  # type: ignore[override]
        """See `AttentionBackend.prepare`. Resolves pages to pool rows."""
        parts: dict[str, list[FusedPart]] = {}
        for edge in sorted(plan.edges, key=lambda edge: first_row(edge, plan.num_rows)):
            for part in self._cut(edge, plan):
                parts.setdefault(part.kind, []).append(part)
        groups = [some for kind in parts for some in self._bounded(parts[kind])]
        rows = [np.concatenate([part.rows for part in group]) for group in groups]
        whole = len(groups) == 1 and np.array_equal(rows[0], np.arange(plan.num_rows))
        calls = [self._call(group, None if whole else mine) for group, mine in zip(groups, rows, strict=True)]
        if whole:
            return FusedCalls(calls, None)
        every = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return FusedCalls(calls, upload(merge_table(every, plan.num_rows), self.device))

    def _cut(self, edge: Edge, plan: AttentionPlan) -> Iterator[FusedPart]:
        """Parts without a mask, and one with a mask for the keys that only some rows see in no causal order."""
        span, rows, visible = plan.spans[edge.span], rows_of(edge, plan.num_rows), visible_of(edge, plan)
        hidden = np.zeros_like(visible) if edge.hidden is None else edge.hidden
        size = self.pool.page_size
        slots = (span.pages.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        first, low, least, most = int(hidden.min()), int(hidden.max()), int(visible.min()), int(visible.max())

        def part(kind: str, start: int, stop: int) -> FusedPart:
            read = slots[start:stop]
            if span.keep is not None and kind != "masked":
                read = read[span.keep[start:stop].numpy()]
            mask = upload(visible_pairs(edge, plan)[:, start:stop], self.device) if kind == "masked" else None
            return FusedPart("single" if len(rows) == 1 else kind, rows, read, span.shift, mask)

        if first == low and least == most:
            found = [part("full", low, most)]
        elif low >= least:
            found = [part("masked", first, most)]
        elif span.keep is None and is_causal(visible - low):
            found = [part("causal", low, most)]
        else:
            found = [part("full", low, least), part("masked", least, most)]
        if first < low < least:
            found.append(part("masked", first, low))
        yield from (one for one in found if len(one.slots))

    def _bounded(self, parts: list[FusedPart]) -> Iterator[list[FusedPart]]:
        """Parts in order, in groups that gather a bounded number of keys."""
        group: list[FusedPart] = []
        keys = 0
        for part in parts:
            if group and keys + len(part.slots) > self._most_keys:
                yield group
                group, keys = [], 0
            group.append(part)
            keys += len(part.slots)
        yield group

    def _call(self, parts: list[FusedPart], rows: np.ndarray | None) -> FusedCall:
        queries, keys = [len(part.rows) for part in parts], [len(part.slots) for part in parts]
        slots = np.concatenate([part.slots for part in parts])
        sequences, on_device = Sequences.make(queries, keys, parts[0].kind == "causal", self.device, slots)
        sequences.masks = [part.mask for part in parts if part.mask is not None]
        cos_sin = None
        if any(part.shift for part in parts):
            assert self.rope is not None
            shifts = np.repeat([-part.shift for part in parts], queries)
            cos_sin = self.rope.shift(upload(torch.from_numpy(shifts), self.device))
        at = None if rows is None else upload(torch.from_numpy(rows), self.device)
        return FusedCall(at, on_device, cos_sin, sequences)

    def run(  # type: ignore[override]
        self, prepared: FusedCalls, q: torch.Tensor, layer: int, scores: Scores | None = None
    ) -> torch.Tensor:
        how = scores or (self.scores[layer] if self.scores else PLAIN)
        k, v = self.pool.k[layer, :, : how.kv_heads], self.pool.v[layer, :, : how.kv_heads]
        outs, sums = [], []
        for call in prepared.calls:
            queries = q if call.rows is None else q[call.rows]
            if call.cos_sin is not None:
                queries = rotate(queries, *call.cos_sin)
            keys = _gather(k, call.slots, q.dtype)
            values = keys if self.pool.v is self.pool.k else _gather(v, call.slots, q.dtype)
            out, lse = self._kernel(call, q, k.shape[1], how)(queries, keys, values, call.sequences, how)
            outs.append(out)
            sums.append(lse)
        if prepared.table is None and how.sinks is None:
            return outs[0]
        if prepared.table is None:
            return _merged(outs[0][:, None], sums[0][:, None], how.sinks).to(q.dtype)
        out = torch.cat((*outs, q.new_zeros(1, *q.shape[1:])))
        if prepared.table.shape[1] == 1 and how.sinks is None:
            return out[prepared.table[:, 0]]
        lse = torch.cat((*sums, q.new_full((1, q.shape[1]), -torch.inf, dtype=torch.float32)))
        return _merged(out[prepared.table], lse[prepared.table], how.sinks).to(q.dtype)

    def _kernel(self, call: FusedCall, q: torch.Tensor, kv_heads: int, how: Scores) -> Kernel:
        if call.sequences.masks or how.cap is not None:
            return by_sequence
        key = (q.dtype, q.shape[1], kv_heads, q.shape[2])
        if key not in self._kernels:
            self._kernels[key] = choose_kernel(q, kv_heads)
        return self._kernels[key]


def open_torch_attention(
    pool: KVPool, rope: RotaryEmbedding | None = None, scores: Sequence[Scores] = ()
) -> TorchAttention:
    """The torch backend for the device of a pool; arguments as for `TorchAttention`."""
    return (TorchAttention if pool.k.device.type == "cpu" else FusedAttention)(pool, rope, scores)


def _gather(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of K or V in `dtype`."""
    if pool.dtype.itemsize == 1:  # float8 has no index_select
        return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).to(dtype)
    return pool.index_select(0, slots).to(dtype)


def _merged(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Merge n partial results of each row: out [rows, n, heads, dim] and lse float32 [rows, n, heads]; float32."""
    total = lse.logsumexp(1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float())
    base = torch.where(torch.isneginf(total), 0.0, total)
    weight = (lse - base[:, None]).exp()
    return (weight[..., None] * out).sum(1)
