"""The libraries of FlashInfer's kernels that Ramet's steps load."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_NAMES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "fp8"}


class Kernel(NamedTuple):
    """A library of kernels: its name, and a function that returns FlashInfer's description of it."""

    name: str
    describe: Callable[[], Any]


def kernels_for(kv_dtype: torch.dtype, head_dim: int) -> Iterator[Kernel]:
    """What a model loads, in the order in which a first run needs it. Raises ImportError without FlashInfer."""
    yield from _common()
    yield from _attention(kv_dtype, head_dim)


def every_kernel() -> Iterator[Kernel]:
    """What all models load: heads of 64 and 128, KV in bfloat16 and fp8; those that are needed most first."""
    yield from _common()
    for kv_dtype in _NAMES:
        for head_dim in (64, 128):
            yield from _attention(kv_dtype, head_dim)


def _common() -> Iterator[Kernel]:
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.quantization import gen_quantization_module
    from flashinfer.jit.rope import gen_rope_module
    from flashinfer.jit.sampling import gen_sampling_module

    yield Kernel("norm", gen_norm_module)
    yield Kernel("rotation", gen_rope_module)
    yield Kernel("activation", lambda: gen_act_and_mul_module("silu"))
    yield Kernel("merge", gen_cascade_module)
    yield Kernel("mask", gen_quantization_module)
    yield Kernel("sampling", gen_sampling_module)


def _attention(kv_dtype: torch.dtype, head_dim: int) -> Iterator[Kernel]:
    of = f"{_NAMES.get(kv_dtype, kv_dtype)}, heads of {head_dim}"
    yield Kernel(f"prefill, {of}", lambda: _prefill(kv_dtype, head_dim))
    yield Kernel(f"decode, {of}", lambda: _decode(kv_dtype, head_dim))


def _prefill(kv_dtype: torch.dtype, head_dim: int) -> Any:
    """Attention of several rows a request, and of single rows if at least 4 query heads share keys."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    half = torch.bfloat16
    # No rotation (mode 0), window, cap or products in half precision within attention.
    return gen_batch_prefill_module(
        "fa2", half, kv_dtype, half, torch.int32, head_dim, head_dim, 0, False, False, False
    )


def _decode(kv_dtype: torch.dtype, head_dim: int) -> Any:
    """Attention of one row a request if fewer than 4 query heads share keys."""
    from flashinfer.jit.attention import gen_batch_decode_module

    half = torch.bfloat16
    return gen_batch_decode_module(half, kv_dtype, half, torch.int32, head_dim, head_dim, 0, False, False)
