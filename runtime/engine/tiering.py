"""The engine's tiers: opened as the options ask for them."""

from __future__ import annotations

from pathlib import Path

from runtime.config import Config
from runtime.execution.executor import Executor
from runtime.kv.cache import PagedCache
from runtime.kv.tiers.block import Fingerprint, Format
from runtime.kv.tiers.disk import DiskStore
from runtime.kv.tiers.host import HostStore
from runtime.kv.tiers.opening import open_cipher, open_shared
from runtime.kv.tiers.store import BlockStore, Limits
from runtime.kv.tiers.tiers import Tiers
from runtime.kv.tiers.worker import TierWorker
from runtime.models.weights import digest_weights

_GIB = 1 << 30


def open_tiers(config: Config, cache: PagedCache, executor: Executor, path: Path) -> Tiers | None:
    """The tiers below the pool of the model directory `path`; None without any. Raises ModelError."""
    asked = config.tiers
    if not asked.any or not cache.enabled:
        return None
    cipher = None if asked.kv_encryption_key_file is None else open_cipher(asked.kv_encryption_key_file)
    stores: list[BlockStore] = []
    if asked.host_memory is not None:
        stores.append(HostStore(Limits(int(asked.host_memory * _GIB))))
    if asked.disk_cache is not None:
        stores.append(DiskStore(asked.disk_cache, Limits(int(asked.disk_space * _GIB))))
    if asked.kv_store is not None:
        stores.append(open_shared(asked.kv_store))
    form = Format(_fingerprint(config, executor, path).digest(), cipher)
    return Tiers(cache, TierWorker(form, stores))


def _fingerprint(config: Config, executor: Executor, path: Path) -> Fingerprint:
    """All that KV depends on, beside its tokens and what lies before them."""
    spec = executor.spec
    layers, _, heads, head_dim = executor.pool.k.shape
    return Fingerprint(
        "random" if config.model.random_weights else digest_weights(path, spec),
        f"{executor.kv_dtype} of {executor.dtype} {config.model.quantization}",
        f"{layers} {heads} {head_dim}",
        config.cache.page_size,
        repr(spec.rope),
        kind="causal" if spec.diffusion is None else "diffusion",
    )
