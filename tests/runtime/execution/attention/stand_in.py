"""FlashInfer's calls in torch, as its documentation describes them; where it is installed, bound to its signatures."""

import functools
import inspect
import math
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

if find_spec("flashinfer"):
    import flashinfer
else:
    flashinfer = None


def fits(name: str, *path: str):
    """Bind every call to the signature of FlashInfer's own `name`."""

    def decorate(function):
        if flashinfer is None:
            return function
        signature = inspect.signature(functools.reduce(getattr, path, getattr(flashinfer, name)))

        @functools.wraps(function)
        def bound(*args, **kwargs):
            signature.bind(*args, **kwargs)
            return function(*args, **kwargs)

        return bound

    return decorate


def slots(indptr, indices, last_page_len, page_size, request):
    """Rows of the flattened pages that a request reads."""
    pages = indices[indptr[request] : indptr[request + 1]].long()
    rows = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    return rows[: (len(pages) - 1) * page_size + int(last_page_len[request])]


def attend(q, k, v, visible):
    """One request: out [n, heads, dim] in q's dtype, lse [n, heads] in base 2."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(groups, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) / math.sqrt(q.shape[-1])
    scores.masked_fill_(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype), lse.t() / math.log(2)


def near(n, m, causal, window_left):
    """Which of m keys each of n queries sees, the last of which is at the last key; `window_left` < 0: no window."""
    seen = torch.ones(n, m, dtype=torch.bool)
    seen = seen.tril(m - n) if causal else seen
    return seen if window_left < 0 else seen.triu(m - n - window_left)


class Wrapper:
    """Base of the decode and the prefill wrapper."""

    made: ClassVar[list] = []

    def __init__(self, workspace, kv_layout, use_cuda_graph=False, **options):
        assert kv_layout == "NHD"
        assert options["backend"] == "fa2"
        self.workspace, self.graph, self.options = workspace, use_cuda_graph, options
        self.plans: list = []
        Wrapper.made.append(self)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert float_workspace_buffer.data_ptr() == self.workspace.data_ptr()
        assert int_workspace_buffer.dtype == torch.uint8

    def fill(self, indptr, indices, last_page_len):
        into = self.buffers()
        assert len(last_page_len) == len(into["last_page_len"]), "the batch size of a graph is fixed"
        into["indptr"].copy_(indptr)
        into["last_page_len"].copy_(last_page_len)
        into["indices"].fill_(-1)
        into["indices"][: len(indices)].copy_(indices)

    def _run(self, q, pages, out, lse, return_lse, visible):
        plan = self.plans[-1]
        assert q.dtype == plan["q_data_type"]
        assert pages[0].dtype == pages[1].dtype == plan["kv_data_type"]
        assert len(q) == plan["qo_indptr"][-1], "queries and plan are of one batch"
        if self.graph:
            # A graph reads the buffers, whatever was planned when it was captured.
            plan = {**plan, **self.buffers()}
        page_size = pages[0].shape[1]
        k, v = (t.flatten(0, 1) for t in pages)
        found, sums = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
        for i in range(len(plan["last_page_len"])):
            rows = slots(plan["indptr"], plan["indices"], plan["last_page_len"], page_size, i)
            mine = slice(int(plan["qo_indptr"][i]), int(plan["qo_indptr"][i + 1]))
            seen = visible(i, mine.stop - mine.start, len(rows))
            found[mine], sums[mine] = attend(q[mine], k[rows], v[rows], seen)
        if out is not None:
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            out.copy_(found)
        if lse is not None:
            assert lse.dtype == torch.float32
            lse.copy_(sums)
        found = found if out is None else out
        return (found, sums if lse is None else lse) if return_lse else found


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr, indptr, indices, last_page_len, heads, kv_heads, dim, page_size,
        custom_mask=None, causal=False, window_left=-1, q_data_type=torch.float16, kv_data_type=None,
        max_token_per_sequence=None, seq_lens=None,
    ):  # fmt: skip
        for host in (qo_indptr, indptr, last_page_len):
            assert host.dtype == torch.int32
            assert not host.is_cuda
        assert indices.dtype == torch.int32
        assert max_token_per_sequence == int((qo_indptr[1:] - qo_indptr[:-1]).max())
        assert seq_lens.dtype == torch.int32
        assert torch.equal(seq_lens, ((indptr[1:] - indptr[:-1]).clamp(min=1) - 1) * page_size + last_page_len)
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool
        self.plans.append({name: value for name, value in locals().items() if name != "self"})
        if self.graph:
            assert self.plans[0]["qo_indptr"][-1] == qo_indptr[-1], "the rows of a graph are fixed"
            assert self.plans[0]["window_left"] == window_left
            self.fill(indptr, indices, last_page_len)
            self.options["qo_indptr_buf"].copy_(qo_indptr)

    def buffers(self):
        names = {name: self.options[f"paged_kv_{name}_buf"] for name in ("indptr", "indices", "last_page_len")}
        return {**names, "qo_indptr": self.options["qo_indptr_buf"]}

    def run(self, q, pages, out=None, lse=None, return_lse=False):
        plan = self.plans[-1]
        mask, taken = plan["custom_mask"], 0

        def visible(request, n, m):
            nonlocal taken
            if mask is not None:
                taken += n * m
                return mask[taken - n * m : taken].view(n, m)
            return near(n, m, plan["causal"], plan["window_left"])

        return self._run(q, pages, out, lse, return_lse, visible)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, heads, kv_heads, dim, page_size,
        window_left=-1, q_data_type=torch.float16, kv_data_type=None,
    ):  # fmt: skip
        qo_indptr = torch.arange(len(last_page_len) + 1)
        self.plans.append({name: value for name, value in locals().items() if name != "self"})
        if self.graph:
            assert self.plans[0]["window_left"] == window_left
            self.fill(indptr, indices, last_page_len)

    def buffers(self):
        return {name: self.options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")}

    def run(self, q, pages, out=None, lse=None, return_lse=False):
        left = self.plans[-1]["window_left"]
        return self._run(q, pages, out, lse, return_lse, lambda i, n, m: near(n, m, False, left))


if flashinfer is not None:
    for ours in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        for method in ("__init__", "plan", "run"):
            setattr(ours, method, fits(ours.__name__, method)(getattr(ours, method)))
        if hasattr(getattr(flashinfer, ours.__name__), "_plan_impl"):  # its plan lets every keyword through
            ours.plan = fits(ours.__name__, "_plan_impl")(ours.plan)


@fits("merge_state_in_place")
def merge_state_in_place(v, s, v_other, s_other, mask=None):
    for tensor in (v, s, v_other, s_other):
        assert tensor.is_contiguous()
    assert v.shape == v_other.shape
    merged, sums = merge_states(torch.stack((v, v_other), 1), torch.stack((s, s_other), 1))
    v.copy_(merged)
    s.copy_(sums)


@fits("merge_states")
def merge_states(v, s):
    assert v.is_contiguous()
    assert s.is_contiguous()
    assert s.dtype == torch.float32
    assert v.shape[2] * v.shape[3] // 8 <= 1024, "threads of a block"
    top = s.amax(1, keepdim=True).nan_to_num(neginf=0.0)
    weight = torch.exp2(s - top)
    total = weight.sum(1)
    merged = (v.float() * weight[..., None]).sum(1) / total.clamp_min(1e-38)[..., None]
    return merged.to(v.dtype), total.log2() + top[:, 0]


@fits("rmsnorm")
def rmsnorm(input, weight, eps=1e-6):
    assert input.dim() in (2, 3)
    wide = input.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)


@fits("fused_add_rmsnorm")
def fused_add_rmsnorm(input, residual, weight, eps=1e-6):
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


@fits("silu_and_mul")
def silu_and_mul(input):
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


@fits("apply_rope_with_cos_sin_cache_inplace")
def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert cos_sin_cache.dtype == torch.float32
    assert is_neox
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    for x in (query, key):
        x = x.view(len(x), -1, head_size)
        a, b = x.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        x.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))


@fits("sampling", "top_k_renorm_probs")
def top_k_renorm_probs(probs, top_k):
    assert top_k.dtype == torch.int32
    kept = torch.zeros_like(probs)
    for row, into, k in zip(probs, kept, top_k.tolist(), strict=True):
        values, tokens = row.topk(k)
        into[tokens] = values / values.sum()
    return kept


@fits("sampling", "top_p_renorm_probs")
def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    assert is_deterministic, "a seed gives the same tokens again"
    values, tokens = probs.sort(descending=True)
    values = values.masked_fill(values.cumsum(-1) - values >= top_p[:, None], 0)
    return torch.zeros_like(probs).scatter_(-1, tokens, values / values.sum(-1, keepdim=True))


def stand_in() -> SimpleNamespace:
    """The module."""
    Wrapper.made = []
    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        merge_states=merge_states,
        merge_state_in_place=merge_state_in_place,
        rmsnorm=rmsnorm,
        sampling=SimpleNamespace(top_k_renorm_probs=top_k_renorm_probs, top_p_renorm_probs=top_p_renorm_probs),
        fused_add_rmsnorm=fused_add_rmsnorm,
        silu_and_mul=silu_and_mul,
        apply_rope_with_cos_sin_cache_inplace=apply_rope_with_cos_sin_cache_inplace,
    )


def options_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of an engine core with a backend: `torch`, `native` or `flashinfer`, by the calls above."""
    if backend == "flashinfer":
        monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
        monkeypatch.setattr("runtime.execution.attention.flashinfer._MERGE_BYTES", 1)
        monkeypatch.setattr("runtime.execution.building.choose_attention", lambda *_: "flashinfer")
        return {"kernels": "torch", "cuda_graph_batches": ""}
    return {"kernels": "auto" if backend == "native" else "torch"}
