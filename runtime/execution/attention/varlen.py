"""Attention of many sequences of different lengths in one call, with log-sum-exp, by torch's fused kernels."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.execution.attention.torch_attention import PLAIN, Scores, attend
from runtime.execution.transfers import upload

log = logging.getLogger("ramet.engine")

# Most scores that `by_sequence` holds at a time: 256 MiB in float32.
_MOST_SCORES = 1 << 26
# Largest difference of a fused kernel from `by_sequence` on random rows, whose results are below 1.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# Numbers of query rows and keys, and `Sequences.causal`: decode rows, prompts, and rows that see all keys.
_TRIED = (([1, 1, 1], [70, 1, 300], False), ([5, 40], [5, 170], True), ([3, 2], [33, 65], False))


@dataclass(slots=True)
class Sequences:
    """Query rows and keys of each sequence of a call, one sequence behind the other.

    Attributes:
        queries, keys: number of query rows and of keys of each sequence.
        causal: whether row i of n sees all keys but the last n - 1 - i; there are at least as many keys as rows.
        starts_q, starts_k: int32 [sequences + 1], the first query row and the first key of each, and their numbers.
        sequence, offset: int32 [rows], the sequence of each query row, and the row's place in it.
        masks: bool [rows, keys] for each sequence; empty: no key is hidden but by `causal`.
    """

    queries: list[int]
    keys: list[int]
    causal: bool
    starts_q: torch.Tensor
    starts_k: torch.Tensor
    sequence: torch.Tensor
    offset: torch.Tensor
    masks: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def make(
        cls, queries: list[int], keys: list[int], causal: bool, device: torch.device, slots: np.ndarray
    ) -> tuple["Sequences", torch.Tensor]:
        """The sequences, and int32 `slots` on the device: all index arrays in one transfer."""
        which = np.repeat(np.arange(len(queries)), queries)
        offset = np.arange(len(which)) - np.repeat(np.cumsum(queries) - queries, queries)
        arrays = [_starts(queries), _starts(keys), which, offset, slots]
        packed = upload(torch.from_numpy(np.concatenate(arrays).astype(np.int32)), device)
        starts_q, starts_k, sequence, place, on_device = packed.split([len(array) for array in arrays])
        return cls(queries, keys, causal, starts_q, starts_k, sequence, place), on_device


# Computes out [rows, heads, dim] and lse float32 [rows, heads] of q [rows, heads, dim], k and v [keys, kv_heads, dim].
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequences, Scores], tuple[torch.Tensor, torch.Tensor]]


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Sequences, how: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention: half precision, heads of up to 256, GPUs from Ampere on."""
    most = max(of.queries), max(of.keys)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, of.starts_q, of.starts_k, *most, 0.0, of.causal, False, scale=how.scale
    )
    return out, lse.t()


def efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Sequences, how: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory-efficient attention: also float32, larger heads and older GPUs; copies keys for all query heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (k, v))
    from_the_end = 2 if of.causal else 0
    most = max(of.queries), max(of.keys)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], k[None], v[None], None, of.starts_q, of.starts_k, *most, 0.0, from_the_end, True, scale=how.scale
    )
    return out[0], lse[of.sequence, :, of.offset]


def by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Sequences, how: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence after the other, a bounded number of rows at a time: any dtype, device, mask and cap."""
    outs, sums = [], []
    masks: Sequence[torch.Tensor | None] = of.masks or [None] * len(of.queries)
    ends_q, ends_k = np.cumsum(of.queries), np.cumsum(of.keys)
    groups = q.shape[1] // k.shape[1]
    for n, m, end_q, end_k, mask in zip(of.queries, of.keys, ends_q, ends_k, masks, strict=True):
        keys, values = (t[end_k - m : end_k].transpose(0, 1)[None] for t in (k, v))
        chunk = max(1, _MOST_SCORES // (m * q.shape[1]))
        for first in range(0, n, chunk):
            rows = min(chunk, n - first)
            mine = q[end_q - n + first : end_q - n + first + rows]
            seen = m - n + first + rows if of.causal else m
            bias = None
            if mask is not None:
                bias = mine.new_zeros(rows, m).masked_fill_(~mask[first : first + rows], -math.inf)
            elif of.causal and rows > 1:
                bias = mine.new_full((rows, seen), -math.inf).triu_(seen - rows + 1)
            # Query heads that share keys become more rows of one head, so that no key is copied.
            grouped = mine.unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)[None]
            bias = None if bias is None else bias.repeat(groups, 1)
            out, lse = attend(grouped, keys[:, :, :seen], values[:, :, :seen], False, bias, how)
            outs.append(out[0].unflatten(1, (groups, rows)).permute(2, 0, 1, 3).flatten(1, 2))
            sums.append(lse[0].unflatten(1, (groups, rows)).permute(2, 0, 1).flatten(1, 2))
    return torch.cat(outs), torch.cat(sums)


def choose_kernel(q: torch.Tensor, kv_heads: int) -> Kernel:
    """The first fused kernel that computes heads of this dtype and size on this device as `by_sequence` does."""
    for kernel in (flash, efficient) if q.device.type == "cuda" else ():
        fault = fault_of(kernel, q, kv_heads)
        if fault is None:
            return kernel
        log.debug("torch's %s attention is not used: %s", kernel.__name__, fault)
    log.warning("torch has no fused attention here for heads of %d in %s: slow", q.shape[-1], q.dtype)
    return by_sequence


def fault_of(kernel: Kernel, q: torch.Tensor, kv_heads: int) -> str | None:
    """What is wrong with a kernel's results on random rows; None: nothing."""
    _, heads, dim = q.shape
    generator = torch.Generator().manual_seed(0)
    for queries, keys, causal in _TRIED:
        of, _ = Sequences.make(queries, keys, causal, q.device, np.empty(0, dtype=np.int32))
        rows, k, v = (
            torch.randn(count, width, dim, generator=generator).to(q.device, q.dtype)
            for count, width in ((sum(queries), heads), (sum(keys), kv_heads), (sum(keys), kv_heads))
        )
        try:
            found, sums = kernel(rows, k, v, of, PLAIN)
        except (RuntimeError, TypeError) as error:
            return str(error).splitlines()[0]
        wanted, wanted_sums = by_sequence(rows, k, v, of, PLAIN)
        if found.shape != wanted.shape or sums.shape != wanted_sums.shape:
            return f"results of shapes {tuple(found.shape)} and {tuple(sums.shape)}"
        error_of = max(float((a.float() - b.float()).abs().max()) for a, b in ((found, wanted), (sums, wanted_sums)))
        if not error_of <= _TOLERANCE[q.dtype]:
            return f"an error of {error_of:.3g}"
    return None


def _starts(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))
