"""One layer's attention by the native kernels alone."""

import ctypes

import torch

from runtime.execution.native import library as c
from runtime.execution.native.packed import Team
from runtime.execution.native.plan import NativePlan


def attend_natively(library, plan, q, pool, rope, threads=2, sinks=None):
    """float32 [rows, heads, dim] of float32 queries of this shape, contiguous."""
    team, (heads, dim) = Team(library, threads), q.shape[1:]
    shape = c.Shape(heads, pool.k.shape[2], dim, pool.page_size, pool.k.dtype == torch.bfloat16)
    kv = c.LayerKV(pool.k[0].data_ptr(), pool.v[0].data_ptr(), None if sinks is None else sinks.data_ptr())
    native = NativePlan(plan, rope)
    out = torch.full(q.shape, torch.nan)
    library.attend(
        team.handle,
        ctypes.byref(shape),
        ctypes.byref(kv),
        native.spans,
        native.edges,
        native.num_edges,
        plan.num_rows,
        q.data_ptr(),
        out.data_ptr(),
    )
    return out
