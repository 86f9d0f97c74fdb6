"""Attention in torch, on any device. Runs of adjacent pages are read as views, without a copy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge, Span
from runtime.execution.attention.backend import AttentionBackend
from runtime.execution.attention.paged_index import is_causal, visible_of, visible_pairs
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate

# Runs of adjacent pages are read as views if they have this many rows on average. Shorter runs: one gather is faster.
_VIEW_FROM_ROWS = 128


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer's attention differs from softmax(q k^T / sqrt(head_dim)) v; None: it does not.

    Attributes:
        scale: replaces 1 / sqrt(head_dim).
        cap: scores become cap * tanh(score / cap).
        sinks: [heads], the score of an additional key per head, whose value is 0 (attention sink).
        kv_heads: number of key-value heads of the layer, if the pool has more.
    """

    scale: float | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None
    kv_heads: int | None = None


PLAIN = Scores()


@dataclass(slots=True)
class KernelCall:
    """One kernel call: attention of some query rows to some pool rows.

    Attributes:
        rows: query rows, as rows of the layer group.
        slots: pool rows; a slice if they are contiguous.
        causal: whether query i sees keys 0 to i; then there are as many keys as queries.
        cos_sin: rotation of the queries, float32 [1, head_dim / 2] each; None: no rotation.
        bias: float [n, length], 0 for visible keys, else -inf; None: all keys are visible.
        first: whether this is the first call for these rows; results of later calls are merged.
    """

    rows: slice | torch.Tensor
    slots: slice | torch.Tensor
    causal: bool
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None
    bias: torch.Tensor | None
    first: bool


class TorchAttention(AttentionBackend):
    """The torch backend."""

    name = "torch"

    def __init__(self, pool: KVPool, rope: RotaryEmbedding | None = None, scores: Sequence[Scores] = ()):
        """`rope`: needed for spans with a shift. `scores`: one for each layer; empty: all layers are `PLAIN`."""
        self.pool = pool
        self.rope = rope
        self.scores = scores
        self.device = pool.k.device
        self.bias_dtype = pool.k.dtype if pool.k.dtype.itemsize > 1 else torch.float32

    def prepare(self, plan: AttentionPlan) -> list[KernelCall]:
        """See `AttentionBackend.prepare`. Resolves pages to pool rows."""
        touched = torch.zeros(plan.num_rows, dtype=torch.bool)
        parts: list[KernelCall] = []
        for edge in plan.edges:
            for part in self._parts(edge, plan):
                part.first = not bool(touched[edge.rows].any())
                touched[edge.rows] = True
                parts.append(part)
        return parts

    def _parts(self, edge: Edge, plan: AttentionPlan) -> list[KernelCall]:
        """Calls without a mask for the keys that all rows see; for other keys, a causal call or one with a mask."""
        span, visible = plan.spans[edge.span], visible_of(edge, plan)
        least, most = int(visible.min()), int(visible.max())
        # No query sees keys before `first`; all queries see keys [low, least).
        first, low = (0, 0) if edge.hidden is None else (int(edge.hidden.min()), int(edge.hidden.max()))
        if first == most:
            return []
        cos_sin = None
        if span.shift:
            assert self.rope is not None
            cos_sin = self.rope.shift(torch.tensor([-span.shift], device=self.device))

        def part(slots: slice | torch.Tensor, causal: bool = False, bias: torch.Tensor | None = None) -> KernelCall:
            return KernelCall(edge.rows, slots, causal, cos_sin, bias, first=False)

        def masked(start: int, stop: int) -> KernelCall:
            seen = visible_pairs(edge, plan)[:, start:stop].to(self.device)
            bias = torch.zeros(seen.shape, dtype=self.bias_dtype, device=self.device).masked_fill_(~seen, -math.inf)
            return part(self._gathered(span, start, stop), bias=bias)

        if span.keep is not None or low >= least:
            return [masked(first, most)]
        rest: list[KernelCall] = []
        if len(visible) > 1 and is_causal(visible):
            least -= 1  # the causal call begins with the last key that the first row sees
            own = self._pieces(span, least, most)
            rest = [part(own[0] if len(own) == 1 else self._gathered(span, least, most), causal=True)]
        elif least < most:
            rest = [masked(least, most)]
        if first < low:
            rest.append(masked(first, low))
        return rest + [part(slots) for slots in self._pieces(span, low, least)]

    def _pieces(self, span: Span, start: int, stop: int) -> list[slice | torch.Tensor]:
        """Pool rows of a part of a span: a slice for each run of adjacent pages, or one tensor if runs are short."""
        page_size = self.pool.page_size
        if start == stop:
            return []
        pages = span.pages[start // page_size : -(-stop // page_size)]
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        if len(breaks) * _VIEW_FROM_ROWS > stop - start:
            return [self._gathered(span, start, stop)]
        pieces: list[slice | torch.Tensor] = []
        for i, run in enumerate(np.split(pages, breaks)):
            skipped = start % page_size if i == 0 else 0
            unused = -stop % page_size if i == len(breaks) else 0
            pieces.append(slice(int(run[0]) * page_size + skipped, (int(run[-1]) + 1) * page_size - unused))
        return pieces

    def _gathered(self, span: Span, start: int, stop: int) -> torch.Tensor:
        pages = torch.tensor(span.pages, dtype=torch.int64, device=self.device)
        rows = torch.arange(self.pool.page_size, device=self.device)
        return (pages[:, None] * self.pool.page_size + rows).flatten()[start:stop]

    def run(
        self, prepared: list[KernelCall], q: torch.Tensor, layer: int, scores: Scores | None = None
    ) -> torch.Tensor:
        if scores is None:
            scores = self.scores[layer] if self.scores else PLAIN
        k, v = self.pool.k[layer, :, : scores.kv_heads], self.pool.v[layer, :, : scores.kv_heads]
        out = torch.zeros_like(q)
        if scores.sinks is None and all(part.first for part in prepared):
            for part in prepared:
                out[part.rows] = self._attend(part, q, k, v, scores)[0]
            return out
        wide = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
        for part in prepared:
            part_out, part_lse = self._attend(part, q, k, v, scores)
            if part.first:
                wide[part.rows], lse[part.rows] = part_out.float(), part_lse
            else:
                wide[part.rows], lse[part.rows] = merge(wide[part.rows], lse[part.rows], part_out, part_lse)
        if scores.sinks is not None:
            wide *= (lse - torch.logaddexp(lse, scores.sinks.float())).exp()[..., None]
        return out.copy_(wide)

    def _attend(
        self, part: KernelCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = q[part.rows]
        if part.cos_sin is not None:
            q = rotate(q, *part.cos_sin)
        k, v = k[part.slots].to(q.dtype), v[part.slots].to(q.dtype)
        n, heads, dim = q.shape
        kv_heads = k.shape[1]
        groups = heads // kv_heads
        # Query heads that share keys form one batch entry, so that no key is copied. If all rows see the same keys,
        # the heads become more query rows. A causal call keeps them as heads, with keys expanded by stride 0.
        grouped = q.view(n, kv_heads, groups, dim).permute(1, 2, 0, 3)
        keys, values = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
        bias = None if part.bias is None else part.bias.to(q.dtype)
        if part.causal:
            keys, values = keys.expand(-1, groups, -1, -1), values.expand(-1, groups, -1, -1)
        else:
            grouped = grouped.reshape(kv_heads, 1, groups * n, dim)
            bias = None if bias is None else bias.repeat(groups, 1)
        out, lse = attend(grouped, keys, values, part.causal, bias, scores)
        out = out.reshape(kv_heads, groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads, dim)
        return out, lse.reshape(kv_heads, groups, n).permute(2, 0, 1).reshape(n, heads)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    bias: torch.Tensor | None,
    how: Scores = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention with log-sum-exp.

    Args:
        q: [batch, heads, n, dim]; k, v: [batch, heads, m, dim].
        causal: row i sees keys 0..i (n == m).
        bias: [n, m], added to the scores.
        how: scale and cap of the scores.

    Returns:
        out [batch, heads, n, dim], and lse float32 [batch, heads, n] (natural logarithm); zeros and -inf for a row
        without visible keys.
    """
    scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
    if q.device.type == "cpu" and how.cap is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    else:
        scores = (q.float() @ k.float().transpose(-1, -2)) * scale
        if how.cap is not None:
            scores = torch.tanh(scores / how.cap) * how.cap
        if causal:
            scores.masked_fill_(torch.ones(scores.shape[-2:], device=q.device).triu(1).bool(), -math.inf)
        if bias is not None:
            scores = scores + bias
        lse = scores.logsumexp(-1)
        out = (torch.exp(scores - lse[..., None]) @ v.float()).to(q.dtype)
    if bias is not None:
        blind = torch.isneginf(bias).all(-1)
        out, lse = out.masked_fill(blind[:, None], 0), lse.masked_fill(blind, -math.inf)
    return out, lse


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two partial results of the same rows: out float32 [n, heads, dim] and lse float32 [n, heads]."""
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(torch.isneginf(lse), 0.0, lse)
    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()
    return out_a * weight_a[..., None] + out_b.float() * weight_b[..., None], lse
