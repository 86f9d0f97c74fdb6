"""Memory: checks whether the weights fit, and sizes the KV pool."""

import math
import os
from dataclasses import replace
from pathlib import Path

import torch

from runtime.config import CacheConfig, Config, ModelConfig
from runtime.errors import ModelError
from runtime.execution.device import choose_attention, choose_device, choose_dtype, wants_native
from runtime.execution.native.library import load_best
from runtime.kv.pool import KVPool
from runtime.models.spec import DecoderSpec, ModelSpec

_GIB = 2**30
# The pool of the layers with a window has room for the ends of conversations of this length.
_TYPICAL = 2048
# Share of a GPU that is left to others, and to buffers of steps.
_SPARE = 0.15


def check_weights(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, num_ranks: int = 1, needed: int | None = None
) -> None:
    """Raise ModelError if a rank's weights do not fit into what is free of its GPU. `needed`: their bytes, if known."""
    if device.type != "cuda":
        return
    free, total = _gpu_memory(device)
    if needed is None:
        from runtime.models.shards import share_of

        expected = spec.unpacked.expected_tensors()
        needed = sum(math.prod(shape) // share_of(name, num_ranks) for name, shape in expected.items())
        needed *= dtype.itemsize
    if needed > free:
        raise ModelError(
            f"the model's weights take {needed / _GIB:.1f} GiB of {device}, of which {free / _GIB:.1f} of "
            f"{total / _GIB:.1f} GiB are free: raise --tensor-parallel"
        )


def _gpu_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU."""
    # What loading and trying kernels left to torch's allocator does not count as free.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def main_memory() -> int:
    """Bytes of main memory that this process may use: the machine's, or the container's limit."""
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    try:
        return min(machine, int(limit.read_text()))
    except (OSError, ValueError):  # no limit
        return machine


def pool_pages(config: CacheConfig, bytes_per_token: int, device: torch.device) -> int:
    """Number of pages for the KV pool in the memory that is free now. Raises ModelError if the number is unusable."""
    if config.pool_tokens is not None:
        tokens = config.pool_tokens
    elif device.type == "cuda" and config.pool_memory is None:
        free, total = _gpu_memory(device)
        tokens = int(free - _SPARE * total) // bytes_per_token
    else:
        tokens = int((config.pool_memory or 1.0) * _GIB) // bytes_per_token
    if device.type == "cpu" and tokens * bytes_per_token > (has := main_memory()):
        raise ModelError(
            f"the KV pool of {tokens} tokens takes {tokens * bytes_per_token / _GIB:.1f} GiB; this machine has "
            f"{has / _GIB:.1f}: lower --pool-tokens or --pool-memory"
        )
    num_pages = tokens // config.page_size
    if num_pages < 2:
        raise ModelError(
            f"the KV pool would hold {max(tokens, 0)} tokens, fewer than two pages of {config.page_size}; "
            f"one token takes {bytes_per_token} bytes: raise --pool-tokens or --pool-memory"
        )
    return num_pages


def choose_context_length(config: ModelConfig, spec: ModelSpec) -> int:
    """The context length of `--context-length`. Raises ModelError if the model has a shorter one."""
    asked = config.context_length
    if asked is not None and asked > spec.context_length:
        raise ModelError(f"--context-length is {asked}; the model supports at most {spec.context_length}")
    return asked or spec.context_length


def choose_kv_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the pool of a model that computes in `dtype`."""
    return torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype


def with_near(config: Config, spec: DecoderSpec, backend: str) -> DecoderSpec:
    """The spec with the layers whose windows are so small that a pool of their own saves memory."""
    # A tier keeps the rows of all layers.
    if backend != "torch" or config.model.tensor_parallel > 1 or config.tiers.any:
        return spec
    context_length = choose_context_length(config.model, spec)
    sizes = {size for size in spec.windows if size is not None and size < context_length}
    near = tuple(i for i, size in enumerate(spec.windows) if size in sizes)
    is_worth = 0 < len(near) < spec.num_layers and 2 * max(sizes) <= min(_TYPICAL, context_length)
    return replace(spec, near=near if is_worth else ())


def near_share(config: Config, spec: DecoderSpec) -> float:
    """Places in the pool of the layers with a window, as a share of the main pool's pages."""
    most = min(_TYPICAL, choose_context_length(config.model, spec))
    return min((spec.largest_window + 2 * config.cache.page_size) / most, 1)


def bytes_per_token(config: Config, spec: ModelSpec, kv_dtype: torch.dtype) -> int:
    """Bytes that a token takes of the memory for pools."""
    shape = spec.num_kv_heads, spec.head_dim
    per_token = KVPool.bytes_per_token(spec.kv_layers, *shape, kv_dtype, spec.halves)
    if isinstance(spec, DecoderSpec) and spec.near:
        per_near = KVPool.bytes_per_token(len(spec.near), *shape, kv_dtype)
        per_token += math.ceil(per_near * near_share(config, spec))
    return per_token


def pool_tokens(config: Config, spec: DecoderSpec) -> int | None:
    """Tokens that the pool will hold; None: what the weights leave of a GPU. Raises ModelError as `build_executor`."""
    from runtime.models.shards import split_spec

    model, cache, device = config.model, config.cache, choose_device(config.model)
    if device.type == "cuda" and cache.pool_tokens is None and cache.pool_memory is None:
        return None
    dtype = choose_dtype(model, device, wants_native(config, device) and load_best() is not None)
    backend = "torch" if spec.needs_torch else choose_attention(model, device, dtype, spec.head_dim)
    share = split_spec(with_near(config, spec, backend), model.tensor_parallel)
    per_token = bytes_per_token(config, share, choose_kv_dtype(cache, dtype))
    return pool_pages(cache, per_token, device) * cache.page_size
