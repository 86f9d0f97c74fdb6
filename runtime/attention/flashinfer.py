"""Attention through FlashInfer's paged wrappers (CUDA). Imported only when used: an extra of the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.attention.backend import AttentionBackend
from runtime.attention.paged_index import PagedIndex, flat_mask, merge_segments, paged_index, rows_of
from runtime.batch import AttentionPlan, Edge
from runtime.kv.pool import KVPool
from runtime.models.ops import rotate
from runtime.models.rope import RotaryEmbedding

_WORKSPACE_BYTES = 128 << 20


@dataclass(slots=True)
class Call:
    """One planned wrapper and the rows that it answers for."""

    wrapper: Any
    rows: torch.Tensor
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True)
class Calls:
    """What a layer group runs: one call that covers all rows in order, or several whose results are merged."""

    calls: list[Call]
    direct: bool
    num_rows: int


class FlashInferAttention(AttentionBackend):
    """Every edge is a virtual request of a batched call; a plan without shared or masked spans needs one call."""

    name = "flashinfer"

    def __init__(self, pool: KVPool, rope: RotaryEmbedding, num_heads: int):
        import flashinfer

        self.pool = pool
        self.rope = rope
        self.num_heads = num_heads
        self._flashinfer = flashinfer
        self._prefill: list[Any] = []
        self._decode: Any = None

    # Wrappers keep their plan in buffers of their own, so each call of a layer group needs one.

    def _prefill_wrapper(self, index: int) -> Any:
        while len(self._prefill) <= index:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.pool.k.device)
            self._prefill.append(
                self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend="fa2")
            )
        return self._prefill[index]

    def _decode_wrapper(self) -> Any:
        if self._decode is None:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.pool.k.device)
            groups = self.num_heads // self.pool.k.shape[2]
            self._decode = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, kv_layout="NHD", use_tensor_cores=groups >= 4
            )
        return self._decode

    def prepare(self, plan: AttentionPlan) -> Calls:
        """Plan the wrappers; synchronises with nothing but FlashInfer's own plan."""
        kinds: dict[str, list[Edge]] = {}
        for edge in plan.edges:
            masked = edge.mode == "masked" or plan.spans[edge.span].keep is not None
            # One row sees the whole span whether the edge is causal or full.
            single = edge.mode == "full" and len(rows_of(edge, plan.num_rows)) == 1
            kinds.setdefault("masked" if masked else "causal" if single else edge.mode, []).append(edge)
        calls = [self._call(plan, edges, kind, i) for i, (kind, edges) in enumerate(kinds.items())]
        direct = len(calls) == 1 and calls[0].cos_sin is None and len(calls[0].rows) == plan.num_rows
        direct = direct and bool((calls[0].rows.cpu() == torch.arange(plan.num_rows)).all())
        return Calls(calls, direct, plan.num_rows)

    def _call(self, plan: AttentionPlan, edges: Sequence[Edge], kind: str, number: int) -> Call:
        index = paged_index(plan, edges, self.pool.page_size)
        if index.decode_only and kind != "masked":
            wrapper = self._plan_decode(index)
        else:
            mask = None
            if kind == "masked":
                flat = [flat_mask(e, plan.spans[e.span], len(rows_of(e, plan.num_rows))) for e in edges]
                mask = torch.cat(flat).to(self.pool.k.device)
            wrapper = self._plan_prefill(index, kind == "causal", mask, number)
        rows = torch.from_numpy(index.rows).to(self.pool.k.device)
        cos_sin = None
        if index.shift.any():
            shift = torch.from_numpy(-index.shift).to(self.pool.k.device)
            angles = shift.float()[:, None] * self.rope.inv_freq
            cos_sin = angles.cos(), angles.sin()
        return Call(wrapper, rows, cos_sin)

    def _plan_decode(self, index: PagedIndex) -> Any:
        wrapper = self._decode_wrapper()
        _, _, kv_heads, head_dim = self.pool.k.shape
        wrapper.plan(
            torch.from_numpy(index.kv_indptr),
            torch.from_numpy(index.kv_indices).to(self.pool.k.device),
            torch.from_numpy(index.last_page_len),
            self.num_heads,
            kv_heads,
            head_dim,
            self.pool.page_size,
            q_data_type=self.pool.k.dtype,
            kv_data_type=self.pool.k.dtype,
        )
        return wrapper

    def _plan_prefill(self, index: PagedIndex, causal: bool, mask: torch.Tensor | None, number: int) -> Any:
        wrapper = self._prefill_wrapper(number)
        _, _, kv_heads, head_dim = self.pool.k.shape
        wrapper.plan(
            torch.from_numpy(index.qo_indptr),
            torch.from_numpy(index.kv_indptr),
            torch.from_numpy(index.kv_indices).to(self.pool.k.device),
            torch.from_numpy(index.last_page_len),
            self.num_heads,
            kv_heads,
            head_dim,
            self.pool.page_size,
            custom_mask=mask,
            causal=causal,
            q_data_type=self.pool.k.dtype,
            kv_data_type=self.pool.k.dtype,
        )
        return wrapper

    def run(self, prepared: Calls, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        page_size, num_pages = self.pool.page_size, self.pool.num_pages
        k, v = (t[layer].view(num_pages, page_size, *t.shape[2:]) for t in (self.pool.k, self.pool.v))
        if prepared.direct:
            return prepared.calls[0].wrapper.run(q, (k, v))
        parts = [self._run_call(call, q, k, v) for call in prepared.calls]
        out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return merge_segments(out, lse, torch.cat([call.rows for call in prepared.calls]), prepared.num_rows)

    def _run_call(
        self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries = q[call.rows]
        if call.cos_sin is not None:
            queries = rotate(queries, *call.cos_sin)
        return call.wrapper.run(queries.contiguous(), (k, v), return_lse=True)
