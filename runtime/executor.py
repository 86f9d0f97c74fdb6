"""Holds the model, the pool and the attention backend on one device, and runs steps on them."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.attention.backend import AttentionBackend
from runtime.attention.cpu import CPUAttention
from runtime.batch import ForwardBatch
from runtime.config import Config
from runtime.device import choose_attention, choose_device, choose_dtype
from runtime.errors import ModelError
from runtime.kv.pool import KVPool
from runtime.models.llama import LlamaModel
from runtime.models.ops import FlashInferOps, Ops
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_weights


class Executor:
    """Runs `ForwardBatch`es."""

    def __init__(self, config: Config, path: Path):
        """Load the model in `path`. Raises ModelError if it cannot be served as configured."""
        self.spec = ModelSpec.load(path)
        self.device = choose_device(config.model)
        self.dtype = choose_dtype(config.model, self.device)
        backend = choose_attention(config.model, self.device)
        self.context_length = _context_length(config, self.spec)
        ops = FlashInferOps() if backend == "flashinfer" and self.dtype == torch.bfloat16 else Ops()
        self.model = LlamaModel(self.spec, load_weights(path, self.spec, self.dtype), self.device, ops)
        self.pool = self._make_pool(config)
        self.backend = self._make_backend(backend)

    def _make_pool(self, config: Config) -> KVPool:
        spec, cache = self.spec, config.cache
        per_token = KVPool.bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.dtype)
        if cache.pool_tokens is not None:
            tokens = cache.pool_tokens
        elif self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            tokens = int(free - (1 - cache.memory_fraction) * total) // per_token
        else:
            tokens = int(cache.pool_memory * 2**30) // per_token
        num_pages = tokens // cache.page_size
        if num_pages < 2:
            raise ModelError(
                f"the KV pool would hold {max(tokens, 0)} tokens, fewer than two pages of {cache.page_size}; "
                f"one token takes {per_token} bytes: raise --pool-tokens, --pool-memory or --memory-fraction"
            )
        return KVPool(
            spec.num_layers, num_pages, cache.page_size, spec.num_kv_heads, spec.head_dim, self.dtype, self.device
        )

    def _make_backend(self, name: str) -> AttentionBackend:
        if name == "cpu":
            return CPUAttention(self.pool, self.model.rope)
        from runtime.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(self.pool, self.model.rope, self.spec.num_heads)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """One step; returns float32 logits [S, vocab] of the batch's `logits_rows`."""
        return self.model.forward(batch, self.pool, self.backend)


def _context_length(config: Config, spec: ModelSpec) -> int:
    asked = config.model.context_length
    if asked is not None and asked > spec.context_length:
        raise ModelError(f"--context-length is {asked}; the model supports at most {spec.context_length}")
    return asked or spec.context_length
