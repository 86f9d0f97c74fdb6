"""Attention through FlashInfer's paged wrappers (CUDA)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.batch import AttentionPlan
from runtime.execution.attention.backend import AttentionBackend
from runtime.execution.attention.paged_index import (
    PagedIndex,
    by_call,
    merge_runs,
    merge_table,
    paged_index,
    visible_pairs,
)
from runtime.execution.attention.windows import windowed
from runtime.execution.flashinfer_package import load_flashinfer
from runtime.execution.transfers import Mark, pin, upload
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, rotate

# FlashInfer recommends this size; `reserve` enlarges it if partial results need more.
_WORKSPACE_BYTES = 128 << 20

# Reading shared pages once costs another call and a merge in every layer, about as much as reading 32 MiB.
_MERGE_BYTES = 32 << 20

# Merging has a block of threads for each row, with a thread for every 8 values of its heads.
_BLOCK_VALUES = 8 * 1024


class Results(NamedTuple):
    """Partial results of rows: out [E, heads, dim], and lse float32 [E, heads] (base 2)."""

    out: torch.Tensor
    lse: torch.Tensor

    def of(self, place: slice) -> "Results":
        """Some of them, as views."""
        return Results(self.out[place], self.lse[place])

    def split(self, heads: int) -> "Results":
        """As results of rows with `heads` heads; each row becomes several, which are neighbours."""
        return Results(self.out.view(-1, heads, self.out.shape[2]), self.lse.view(-1, heads))


@dataclass(slots=True)
class Call:
    """One planned wrapper.

    Attributes:
        rows: query rows, as rows of the layer group; a slice if they are contiguous; None: all in order.
        cos_sin: rotation of the queries by the shifts of their spans, float32 [rows, head_dim / 2] each.
        into: where the call writes its partial results; None: it has the only results.
    """

    wrapper: Any
    rows: slice | torch.Tensor | None
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None
    into: Results | None = None


@dataclass(slots=True)
class GroupCalls:
    """The planned calls of a layer group, which each of its layers runs.

    Attributes:
        calls: the calls.
        merges: pairs (partial results, others of the same rows, which are added to them).
        whole: [rows, heads, dim], where the results are once `merges` are done; None: there is a table or one call.
        table: int64 [rows * parts, n], how to merge `every`, see `merge_table`; the heads of each row are merged in
            parts of `FlashInferAttention.merged_heads`.
        every: all partial results in parts; the last ones are empty, for the padding of `table`.
    """

    calls: list[Call]
    merges: Sequence[tuple[Results, Results]] = ()
    whole: torch.Tensor | None = None
    table: torch.Tensor | None = None
    every: Results | None = None


class FlashInferAttention(AttentionBackend):
    """Cascade attention: each edge is a virtual request of a batched call, for any number of sharing levels.

    `by_call` groups the edges into calls. A plan without sharing needs one call and no merge.
    """

    name = "flashinfer"

    def __init__(self, pool: KVPool, rope: RotaryEmbedding, num_heads: int, dtype: torch.dtype = torch.bfloat16):
        """`num_heads`, `dtype`: number of query heads, and dtype of queries."""
        self.pool = pool
        self.rope = rope
        self.num_heads = num_heads
        self.dtype = dtype
        self.device = pool.k.device
        # K and V of each layer, each [pages, page_size, kv_heads, head_dim].
        self.pages = [
            tuple(half[layer].unflatten(0, (-1, pool.page_size)) for half in (pool.k, pool.v))
            for layer in range(len(pool.k))
        ]
        self.least_saved_tokens = _MERGE_BYTES // (2 * pool.k[0, 0].numel() * pool.k.dtype.itemsize)
        # Heads of a row that are merged at once.
        self.merged_heads = next(
            n for n in range(num_heads, 0, -1) if not num_heads % n and n * pool.k.shape[-1] <= _BLOCK_VALUES
        )
        self._flashinfer = load_flashinfer()
        cuda = self.device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 1
        self.workspace = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.reserve(0, 0)
        # The device copies plans from the wrappers' pinned memory, in stream order; this marks the end of the copies.
        self._plans_copied = Mark(self.device)
        self._wrappers: dict[str, list[Any]] = {"prefill": [], "decode": []}
        self._used = dict.fromkeys(self._wrappers, 0)

    def prepare_step(self, plans: Sequence[AttentionPlan]) -> list[GroupCalls]:
        self._used = dict.fromkeys(self._wrappers, 0)
        prepared: dict[int, GroupCalls] = {}  # layer groups with the same window share a plan
        with self.planning():
            for plan in plans:
                if id(plan) not in prepared:
                    prepared[id(plan)] = self.prepare(plan)
        return [prepared[id(plan)] for plan in plans]

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Context for planning wrappers, including wrappers that an earlier step used.

        Waits until the device has copied the earlier plans. The device copies them at the beginning of their step, so
        the host waits only if it is more than one step ahead.
        """
        self._plans_copied.wait()
        try:
            yield
        finally:
            self._plans_copied.set()

    def reserve(self, queries: int, requests: int) -> None:
        """Enlarge the workspace for a call in a graph, or with zeros for calls without a graph.

        FlashInfer keeps float32 partial results of tiles of query rows: in a graph for every possible tile, otherwise
        for the tiles that run at the same time.

        Args:
            queries: of all virtual requests.
            requests: number of virtual requests, at most one more than `queries`; beyond, FlashInfer's plan overflows.
        """
        _, kv_heads, head_dim = self.pool.k.shape[1:]
        group = self.num_heads // kv_heads
        most = (queries - requests + 1) * group  # FlashInfer's estimate of a request's queries, by which tiles are cut
        tile = 128 if most > 64 or not queries else 64 if most > 16 else 16
        tiles = max(2 * self._num_sms // kv_heads, -(-queries * group // tile) + requests - 1)
        size = max(_WORKSPACE_BYTES, tiles * tile * self.num_heads * (head_dim + 1) * 4)
        if size > len(self.workspace):
            # All wrappers share the workspace, as kernels run one after the other. Older wrappers keep the old one.
            # The split kernels have counters in it, which must start at zero.
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _wrapper(self, kind: str) -> Any:
        # The device copies a plan from the wrapper's buffers while the step runs, so each call of a step needs its own
        # wrapper, in all layer groups.
        wrappers, index = self._wrappers[kind], self._used[kind]
        self._used[kind] += 1
        if index == len(wrappers):
            wrappers.append(self.make_decode() if kind == "decode" else self.make_prefill())
        return wrappers[index]

    def make_prefill(self, **buffers: Any) -> Any:
        """A wrapper for several queries per request; `buffers`: the fixed buffers of a CUDA graph."""
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, kv_layout="NHD", backend="fa2", **buffers
        )

    def make_decode(self, **buffers: Any) -> Any:
        """A wrapper for one query per request; `buffers`: the fixed buffers of a CUDA graph."""
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, kv_layout="NHD", use_tensor_cores=self.uses_tensor_cores, backend="fa2", **buffers
        )

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether enough query heads share keys to compute decode steps as matrix products."""
        return self.num_heads // self.pool.k.shape[2] >= 4

    def prepare(self, plan: AttentionPlan) -> GroupCalls:
        page_size = self.pool.page_size
        plan, window = windowed(plan, page_size)
        parts = by_call(plan, page_size, window)
        indexes = {kind: paged_index(part, page_size) for kind, part in parts.items()}
        calls = [self._call(part, kind, indexes[kind], window) for kind, part in parts.items()]
        rows = [index.rows for index in indexes.values()]
        whole = next((i for i, call in enumerate(calls) if call.rows is None), None)
        if len(calls) == 1 and calls[0].cos_sin is None and whole is not None:
            return GroupCalls(calls)
        ends = np.cumsum([0] + [len(part) for part in rows]).tolist()
        results = self.results(ends[-1] + 1)
        for call, place in zip(calls, pairwise(ends), strict=True):
            call.into = results.of(slice(*place))
        runs = None if whole is None else merge_runs(rows, whole)
        if whole is not None and runs is not None:
            return self.merged(calls, whole, results, runs)
        # The padding of the table: nothing.
        results.out[-1], results.lse[-1] = 0, -torch.inf
        table = merge_table(np.concatenate(rows) if rows else np.empty(0, dtype=np.int64), plan.num_rows)
        split = self.num_heads // self.merged_heads
        table = (table[:, None] * split + torch.arange(split)[:, None]).flatten(0, 1)
        return GroupCalls(calls, table=upload(table, self.device), every=results.split(self.merged_heads))

    def results(self, count: int) -> Results:
        """Room for `count` partial results, not initialised."""
        out = torch.empty(count, self.num_heads, self.pool.k.shape[-1], dtype=self.dtype, device=self.device)
        return Results(out, torch.empty(out.shape[:2], dtype=torch.float32, device=self.device))

    def merged(
        self, calls: list[Call], whole: int, results: Results, runs: Sequence[tuple[slice, slice]]
    ) -> GroupCalls:
        """Calls of which `whole` has all rows in order; `runs` of other `results` are merged into its, in place."""
        heads, into = self.merged_heads, calls[whole].into
        assert into is not None
        merges = [(results.of(one).split(heads), results.of(other).split(heads)) for one, other in runs]
        return GroupCalls(calls, merges, into.out)

    def _call(self, plan: AttentionPlan, kind: str, index: PagedIndex, window: int | None) -> Call:
        if kind != "causal":
            window = None
        if index.decode_only and kind != "masked":
            wrapper = self._wrapper("decode")
            self.plan_decode(wrapper, index, window)
        else:
            wrapper = self._wrapper("prefill")
            mask = None
            if kind == "masked":
                mask = upload(torch.cat([visible_pairs(edge, plan).flatten() for edge in plan.edges]), self.device)
            self.plan_prefill(wrapper, index, kind == "causal", mask, window)
        cos_sin = None
        if index.shift.any():
            cos_sin = self.rope.shift(upload(torch.from_numpy(-index.shift), self.device))
        return Call(wrapper, self._place(index.rows, plan.num_rows), cos_sin)

    def _place(self, rows: np.ndarray, num_rows: int) -> slice | torch.Tensor | None:
        if np.array_equal(rows, np.arange(num_rows)):
            return None
        if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return slice(int(rows[0]), int(rows[0]) + len(rows))
        return upload(torch.from_numpy(rows), self.device)

    def plan_decode(self, wrapper: Any, index: PagedIndex, window: int | None) -> None:
        """Plan a decode wrapper for one query a request, which sees the last `window` keys; None: all."""
        wrapper.plan(
            pin(torch.from_numpy(index.kv_indptr), self.device),
            upload(torch.from_numpy(index.kv_indices), self.device),
            pin(torch.from_numpy(index.last_page_len), self.device),
            *self._shape(),
            window_left=-1 if window is None else window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.pool.k.dtype,
        )

    def plan_prefill(
        self,
        wrapper: Any,
        index: PagedIndex,
        causal: bool = False,
        mask: torch.Tensor | None = None,
        window: int | None = None,
    ) -> None:
        """Plan a prefill wrapper.

        Args:
            causal: whether query i of n sees all keys but the last n - 1 - i, or with `window` the last of these.
            mask: bool, `visible_pairs` of all requests, flattened and concatenated; None: see `causal`.
        """
        wrapper.plan(
            pin(torch.from_numpy(index.qo_indptr), self.device),
            pin(torch.from_numpy(index.kv_indptr), self.device),
            upload(torch.from_numpy(index.kv_indices), self.device),
            pin(torch.from_numpy(index.last_page_len), self.device),
            *self._shape(),
            custom_mask=mask,
            causal=causal,
            window_left=-1 if window is None else window - 1,
            q_data_type=self.dtype,
            kv_data_type=self.pool.k.dtype,
            # FlashInfer would copy lengths of its own from memory that is not pinned, in each plan.
            seq_lens=pin(torch.from_numpy(index.lengths(self.pool.page_size)), self.device),
            max_token_per_sequence=int(np.diff(index.qo_indptr).max()),
        )

    def _shape(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, head_dim and page size."""
        _, _, kv_heads, head_dim = self.pool.k.shape
        return self.num_heads, kv_heads, head_dim, self.pool.page_size

    def run(self, prepared: GroupCalls, q: torch.Tensor, layer: int) -> torch.Tensor:
        pages = self.pages[layer]
        for call in prepared.calls:
            queries = q if call.rows is None else q[call.rows]
            if call.cos_sin is not None:
                queries = rotate(queries, *call.cos_sin)
            if call.into is None:
                return call.wrapper.run(queries, pages)
            call.wrapper.run(queries, pages, out=call.into.out, lse=call.into.lse, return_lse=True)
        for into, other in prepared.merges:
            self._flashinfer.merge_state_in_place(*into, *other)
        if prepared.whole is not None:
            return prepared.whole
        assert prepared.table is not None
        assert prepared.every is not None
        out, lse = prepared.every
        return self._flashinfer.merge_states(out[prepared.table], lse[prepared.table])[0].view(q.shape)
