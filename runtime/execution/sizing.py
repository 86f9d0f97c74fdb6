"""Memory: checks whether the weights fit, and sizes the KV pool."""

import math
import os
from pathlib import Path

import torch

from runtime.config import CacheConfig
from runtime.errors import ModelError
from runtime.models.shards import share_of
from runtime.models.spec import LlamaSpec

_GIB = 2**30
# Share of a GPU that is left to others, and to buffers of steps.
_SPARE = 0.15


def check_weights(spec: LlamaSpec, dtype: torch.dtype, device: torch.device, num_ranks: int = 1) -> None:
    """Raise ModelError if a rank's weights do not fit into what is free of its GPU."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    expected = spec.unpacked.expected_tensors()
    needed = sum(math.prod(shape) // share_of(name, num_ranks) for name, shape in expected.items())
    needed *= dtype.itemsize
    if needed > free:
        raise ModelError(
            f"the model's weights take {needed / _GIB:.1f} GiB of {device}, of which {free / _GIB:.1f} of "
            f"{total / _GIB:.1f} GiB are free: raise --tensor-parallel"
        )


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
        free, total = torch.cuda.mem_get_info(device)
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
