"""Plain attention by an attention plan, and random plans: the reference of every backend."""

import math

import numpy as np
import torch

from runtime.batch import AttentionPlan, Span, causal_visible
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.rope_spec import RopeSpec

CPU = torch.device("cpu")


def dense_attention(plan, q, pool, rope, sinks=None):
    """Softmax over all that a row's edges show it, in float64 on the CPU; keys are moved, not queries.

    A row that sees nothing gives zeros.
    """
    group = q.shape[1] // pool.k.shape[2]
    total = sum(plan.spans[edge.span].length for edge in plan.edges)
    scores = torch.full((q.shape[1], plan.num_rows, total), -torch.inf, dtype=torch.float64)
    values = torch.empty(q.shape[1], total, q.shape[2], dtype=torch.float64)
    first = 0
    for edge in plan.edges:
        span, rows = plan.spans[edge.span], torch.arange(plan.num_rows)[edge.rows]
        pages = torch.from_numpy(span.pages).long()
        slots = (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()[: span.length]
        k, v = (t[0][slots.to(t.device)].cpu().double().repeat_interleave(group, 1) for t in (pool.k, pool.v))
        k = moved(k, span.shift, rope) if span.shift else k
        products = torch.einsum("nhd,mhd->hnm", q[rows.to(q.device)].cpu().double(), k) / math.sqrt(q.shape[-1])
        limits = torch.full((len(rows),), span.length) if edge.visible is None else torch.from_numpy(edge.visible)
        seen = torch.arange(span.length) < limits[:, None]
        if edge.hidden is not None:
            seen &= torch.arange(span.length) >= torch.from_numpy(edge.hidden)[:, None]
        if span.keep is not None:
            seen &= span.keep
        here = slice(first, first + span.length)
        scores[:, rows, here] = products.masked_fill(~seen, -torch.inf)
        values[:, here] = v.transpose(0, 1)
        first += span.length
    none = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
    scores = torch.cat((scores, none.double()[:, None, None].expand(-1, plan.num_rows, 1)), dim=-1)
    # Rows that see nothing have a softmax of NaN.
    return (scores.softmax(-1).nan_to_num(0)[..., :-1] @ values).transpose(0, 1)


def moved(x, shift, rope):
    """Rows [n, heads, dim], rotated for some positions, `shift` positions further on, in float64."""
    angles = shift * rope.inv_freq.cpu().double()
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Pages:
    """Spans of pages that no other span has."""

    def __init__(self, pool, random):
        self.page_size, self.random, self.free = pool.page_size, random, np.arange(pool.num_pages, dtype=np.int32)

    def span(self, length, scattered=True, **options):
        count = -(-length // self.page_size)
        free = self.random.permutation(self.free) if scattered else np.sort(self.free)
        pages, self.free = free[:count], free[count:]
        return Span(pages, length, **options)


class World:
    """A pool of random rows, and spans of its pages; what computes over them is that of a subclass."""

    def __init__(self, seed, rows, page_size, kv_heads, dim, dtype=torch.float32, device=CPU):
        self.random, self.generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.rope = RotaryEmbedding(RopeSpec(theta=10000.0), dim, device)
        self.pool = KVPool(1, rows // page_size, page_size, kv_heads, dim, dtype, device)
        for tensor in (self.pool.k, self.pool.v):
            tensor.copy_(self.draw(*tensor.shape))
        self.pages = Pages(self.pool, self.random)
        self.span = self.pages.span

    def draw(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def causal(self, plan, rows, length, **options):
        plan.add(rows, self.span(length, **options), causal_visible(length, rows.stop - rows.start))


def visible_at_random(random, rows, length):
    """Every pattern that a planner may ask for, and some that none asks for."""
    kind = random.choice(["all", "causal", "run", "any", "sorted", "same"])
    if kind == "all":
        return None
    if kind == "causal" and rows <= length:
        return causal_visible(length, rows)
    if kind == "run" and rows <= length:
        first = int(random.integers(1, length - rows + 2))
        return np.arange(first, first + rows, dtype=np.int32)
    if kind == "same":
        return np.full(rows, random.integers(length + 1), dtype=np.int32)
    visible = random.integers(length + 1, size=rows).astype(np.int32)
    return np.sort(visible) if kind == "sorted" else visible


def hidden_at_random(random, visible):
    """Rows that are hidden from each row, none or up to all that it would see."""
    if random.integers(3):
        return None
    hidden = random.integers(visible + 1).astype(np.int32)
    return hidden if random.integers(2) else np.minimum(np.sort(hidden), visible)


def random_plan(pages, num_rows, longest):
    """Edges over rows that overlap, as slices and scattered, shifted and thinned; some rows may see nothing."""
    random, plan = pages.random, AttentionPlan(num_rows)
    for _ in range(int(random.integers(1, 7))):
        count, length = int(random.integers(1, num_rows + 1)), int(random.integers(1, longest))
        first = int(random.integers(num_rows - count + 1))
        rows = slice(first, first + count)
        if random.integers(2):
            rows = torch.from_numpy(random.permutation(num_rows)[:count])
        span = pages.span(length, bool(random.integers(2)), shift=int(random.choice([0, 0, 1, -50, 4321])))
        if not random.integers(3):
            span.keep = torch.from_numpy(random.random(length) < 0.7)
        visible = visible_at_random(random, count, length)
        hidden = hidden_at_random(random, np.full(count, length, dtype=np.int32) if visible is None else visible)
        plan.add(rows, span, visible, hidden)
    return plan
