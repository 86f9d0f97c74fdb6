"""Builds an executor: chooses the kernels of a device, loads the weights, and makes the pools and the CUDA graphs."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from runtime.config import Config
from runtime.errors import ModelError
from runtime.execution.attention.fused import open_torch_attention
from runtime.execution.attention.torch_attention import Scores
from runtime.execution.attention.windows import LayerWindows, Window
from runtime.execution.device import (
    choose_attention,
    choose_device,
    choose_dtype,
    flashinfer_unfit,
    is_lost,
    is_out_of_memory,
    most_running,
    set_current,
    step_tokens,
    wants_native,
)
from runtime.execution.executor import Decoder, Executor
from runtime.execution.flashinfer_package import COST
from runtime.execution.loading import LoadedModel, load_model
from runtime.execution.native.choosing import NativeChoosing
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.native.library import Library, load_best
from runtime.execution.ops import FlashInferOps, Ops
from runtime.execution.sizing import (
    bytes_per_token,
    choose_context_length,
    choose_kv_dtype,
    near_share,
    pool_pages,
    with_near,
)
from runtime.kv.near import NearPages, most_places
from runtime.kv.pool import KVPool
from runtime.kv.states import StatePool
from runtime.models.implementation import own_spec
from runtime.models.shards import Shard, split_spec
from runtime.models.spec import DecoderSpec, ModelSpec

if TYPE_CHECKING:
    from runtime.execution.graphs import StepGraphs
    from runtime.execution.parallel.group import RankGroup
    from runtime.execution.torch_decoder import TorchDecoder

log = logging.getLogger("ramet.engine")

# Torch's default, which follows $OMP_NUM_THREADS; read before a builder changes it.
_ALL_THREADS = torch.get_num_threads()
# Bits of `--quantization`.
_BITS = {"int4": 4, "int8": 8}
# Slots for states within a step, beside two for each request.
_SLOTS = 8


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model is computed. `group`: this rank's; None: there is one rank."""

    config: Config
    device: torch.device
    dtype: torch.dtype
    group: RankGroup | None

    @property
    def kv_dtype(self) -> torch.dtype:
        return choose_kv_dtype(self.config.cache, self.dtype)

    @property
    def most_running(self) -> int:
        return self.config.scheduler.max_running or most_running(self.device)

    def share(self, spec: DecoderSpec) -> DecoderSpec:
        """This rank's share of a model."""
        return spec if self.group is None else split_spec(spec, self.group.size)

    def set_threads(self) -> int:
        """Let torch compute with `--threads`; returns their number."""
        threads = self.config.engine.threads or _ALL_THREADS
        torch.set_num_threads(threads)
        return threads


class _Pools(NamedTuple):
    """See `Executor`."""

    pool: KVPool
    near: NearPages | None
    states: StatePool | None


def build_executor(config: Config, path: Path, group: RankGroup | None = None) -> Executor:
    """Load the model directory `path`, or with `group` this rank's shard. Raises ModelError."""
    device = choose_device(config.model) if group is None else group.device
    set_current(device)
    spec = own_spec(config.model, path)
    if spec is not None and spec.needs_torch and config.model.kernels == "flashinfer":
        raise ModelError(f"--kernels flashinfer is not served with {spec.architecture}")
    library = None if spec is None else _choose_kernels(config, device)
    if library is None and (config.model.quantization in _BITS or config.model.kernels == "native"):
        raise ModelError("--quantization int4 or int8 and --kernels native need the native kernels of a CPU")
    place = _Place(config, device, choose_dtype(config.model, device, library is not None), group)
    executor = _with_transformers(place, path) if spec is None else _with_own_code(place, path, spec, library)
    whose = "Ramet's own code" if spec is not None else "transformers' code, at its speed,"
    log.info("%s computes %s", whose, executor.spec.architecture)
    return executor


def _with_transformers(place: _Place, path: Path) -> Executor:
    # Imported here, because importing transformers is slow and Ramet's own code does not need it.
    from runtime.execution.transformers.model import TransformersModel

    config, device, dtype = place.config, place.device, place.dtype
    if config.model.kernels == "flashinfer":
        raise ModelError("--kernels flashinfer is not served with transformers' code")
    place.set_threads()
    model = TransformersModel(path, config.model, dtype, device)
    context_length = choose_context_length(config.model, model.spec)
    pools = _make_pools(place, model.spec)
    backend = open_torch_attention(pools.pool)
    forward = partial(model.forward, pool=pools.pool, backend=backend, states=pools.states)
    decoder = Decoder(model, forward, backend.name, note=_note(device, "transformers' code computes the model"))
    has_windows = any(window.size < context_length for window in model.windows)
    return Executor(model.spec, context_length, device, dtype, decoder, *pools, has_windows, None)


def _with_own_code(place: _Place, path: Path, spec: DecoderSpec, library: Library | None) -> Executor:
    config, device, group = place.config, place.device, place.group
    context_length = choose_context_length(config.model, spec)
    backend, note = _choose_attention(place, spec)
    spec = with_near(config, spec, backend)
    share = place.share(spec)
    ops = FlashInferOps(context_length, group) if backend == "flashinfer" else Ops(group)
    if device.type == "cpu":  # report a pool that is too large before reading the weights
        _pool_pages(place, share)
    shard = None if group is None else Shard(group.rank, group.size)
    loaded = load_model(config.model, path, spec, place.dtype, device, ops, library is not None, shard)
    model = loaded.model
    graphs = _graph_sizes(place, spec, model.most_free_rows) if backend == "flashinfer" else []
    pools = _make_pools(place, share, spare_pages=1 if graphs else 0)
    model.states = pools.states
    if library is not None:
        decoder = _decode_natively(place, library, loaded, pools)
    else:
        place.set_threads()
        if backend == "torch":
            decoder = _decode_with_torch(model, pools)
        else:
            decoder = _decode_with_flashinfer(place, model, pools.pool, graphs, context_length)
    given = config.model.quantization
    decoder.quantization, decoder.note = given if given in _BITS else loaded.quantization, note
    windows = _windows_of(spec, context_length, pools)
    return Executor(spec, context_length, device, place.dtype, decoder, *pools, windows is not None, windows)


def _decode_natively(place: _Place, library: Library, loaded: LoadedModel, pools: _Pools) -> Decoder:
    near, bits = None if pools.near is None else pools.near.pool, _BITS.get(place.config.model.quantization, 0)
    native = NativeDecoder(library, loaded.model, pools.pool, place.set_threads(), bits, loaded.stored, near)
    # After a parallel operation, torch's threads spin on the cores that the kernels use.
    torch.set_num_threads(1)
    return Decoder(native, native.forward, native.name, choosing=NativeChoosing(native.team, native.argmax))


def _decode_with_torch(model: TorchDecoder, pools: _Pools) -> Decoder:
    attention = open_torch_attention(pools.pool, model.rope, [Scores(sinks=one) for one in model.sinks()])
    near = None
    if pools.near is not None:
        near = open_torch_attention(pools.near.pool, scores=[Scores(sinks=one) for one in model.sinks(near=True)])
    forward = partial(model.forward, pool=pools.pool, backend=attention, near=near)
    return Decoder(model, forward, attention.name, least_saved_tokens=attention.least_saved_tokens)


def _decode_with_flashinfer(
    place: _Place, model: TorchDecoder, pool: KVPool, sizes: list[int], context_length: int
) -> Decoder:
    from runtime.execution.attention.flashinfer import FlashInferAttention
    from runtime.execution.graphs import StepGraphs

    attention = FlashInferAttention(pool, model.rope, model.spec.num_heads, place.dtype)
    forward = partial(model.forward, pool=pool, backend=attention)
    decoder = Decoder(model, forward, attention.name, least_saved_tokens=attention.least_saved_tokens)
    if sizes:
        prompts = _prompt_sizes(place, model.most_free_rows)
        graphs = StepGraphs(model, pool, attention, sizes, prompts, context_length)
        decoder.graphs = graphs if _capture(graphs, place) else None
    return decoder


def _windows_of(spec: DecoderSpec, context_length: int, pools: _Pools) -> LayerWindows | None:
    """The windows by which steps are narrowed; None: all layers see the whole context."""
    if not spec.near_rope and all(size is None or size >= context_length for size in spec.windows):
        return None
    windows = [None if size is None else Window(size) for size in spec.windows]
    return LayerWindows(windows, pools.pool.page_size, pools.near, spec.near_rope is not None)


def _pool_pages(place: _Place, spec: ModelSpec) -> tuple[int, int]:
    """Number of pages of the pool, and bytes per token."""
    per_token = bytes_per_token(place.config, spec, place.kv_dtype)
    return pool_pages(place.config.cache, per_token, place.device), per_token


def _make_near(place: _Place, spec: DecoderSpec, num_pages: int) -> NearPages:
    page_size = place.config.cache.page_size
    prompt = most_places(spec.largest_window, page_size)  # beside the ends of conversations, one that is prefilled
    count = min(math.ceil(num_pages * near_share(place.config, spec)) + prompt, num_pages)
    shape = (len(spec.near), count, page_size, spec.num_kv_heads, spec.head_dim)
    return NearPages(KVPool(*shape, place.kv_dtype, place.device), num_pages)


def _make_pools(place: _Place, spec: ModelSpec, spare_pages: int = 0) -> _Pools:
    """The pools of a model, or of this rank's share of it. Raises ModelError if they do not fit."""
    page_size, device = place.config.cache.page_size, place.device
    num_pages, per_token = _pool_pages(place, spec)
    if place.group is not None:
        num_pages = place.group.least(num_pages)
    shape = (spec.kv_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
    try:
        states = near = None
        if spec.states:
            states = StatePool(spec.states, 2 * place.most_running + _SLOTS, device, spec.records)
        if isinstance(spec, DecoderSpec) and spec.near:
            near = _make_near(place, spec, num_pages)
        return _Pools(KVPool(*shape, place.kv_dtype, device, spare_pages, spec.halves), near, states)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        size = num_pages * page_size * per_token / (1 << 30)
        raise ModelError(f"the KV pool of {size:.1f} GiB does not fit: lower --pool-tokens or --pool-memory") from None


def _choose_kernels(config: Config, device: torch.device) -> Library | None:
    if not wants_native(config, device):
        return None
    library = load_best()
    if library is None:
        log.warning(
            "the native CPU kernels were not built for this version (no C++20 compiler?) or there is no AVX2; "
            "torch computes instead, several times slower"
        )
    return library


def _choose_attention(place: _Place, spec: DecoderSpec) -> tuple[str, str]:
    """The backend for a model of Ramet's own code, and its note. FlashInfer must first compute one step of each kind.

    Raises ModelError if `--kernels flashinfer` cannot be had, or if a failed kernel has made the GPU unusable.
    """
    kernels, device, dtype = place.config.model.kernels, place.device, place.dtype
    if spec.needs_torch:
        return "torch", _note(device, f"FlashInfer does not compute {spec.architecture}")
    backend = choose_attention(place.config.model, device, dtype, spec.head_dim)
    if backend == "torch":
        if (why := flashinfer_unfit(device, dtype, spec.head_dim)) is not None:
            return backend, _note(device, why)
        return backend, _note(device, f"--kernels {kernels}", logging.INFO)
    from runtime.execution.readiness import find_fault

    page_size, quiet = place.config.cache.page_size, place.group is not None
    fault = find_fault(place.share(spec), dtype, place.kv_dtype, page_size, device, quiet)
    if fault is None:
        return backend, ""
    if kernels == "flashinfer":
        raise ModelError(f"--kernels flashinfer: {fault}")
    if is_lost(device):
        raise ModelError(f"{fault}. The GPU cannot be used any more; start with --kernels torch")
    return "torch", _note(device, fault)


def _note(device: torch.device, why: str, level: int = logging.WARNING) -> str:
    """`Decoder.note`, which is also logged: why torch computes in place of FlashInfer, if this is a GPU."""
    if device.type == "cpu":
        return ""
    note = f"{why}. {COST[0].upper()}{COST[1:]}"
    log.log(level, "torch computes attention, not FlashInfer: %s", note)
    return note


def _graph_sizes(place: _Place, spec: DecoderSpec, most_rows: float) -> list[int]:
    """Rows of the CUDA graphs of decode steps, up to `most_rows`; empty with several ranks, or if not causal."""
    if place.group is not None or not spec.causal:
        return []
    sizes = {int(size) for size in place.config.engine.cuda_graph_batches.split(",") if size}
    return sorted(size for size in sizes if 0 < size <= most_rows)


def _prompt_sizes(place: _Place, most_rows: float) -> list[int]:
    """Rows of the CUDA graphs of steps with prompts, up to `most_rows`, and up to what a step may have."""
    from runtime.execution.graphs import PROMPT_SIZES

    most = bisect_left(PROMPT_SIZES, place.config.scheduler.step_tokens or step_tokens(place.device)) + 1
    return [size for size in PROMPT_SIZES[:most] if size <= most_rows]


def _capture(graphs: StepGraphs, place: _Place) -> bool:
    """Capture the graphs of steps of all running requests. Returns False if this fails: steps run without graphs.

    Raises ModelError if the failure has made the GPU unusable.
    """
    from runtime.execution.readiness import capture_graphs

    if place.device.type == "cpu":
        return True
    try:
        capture_graphs(graphs, place.most_running, place.device)
    except Exception as error:  # of the driver, the allocator or a kernel
        if is_lost(place.device):
            raise ModelError(f"a CUDA graph cannot be captured ({error}): --cuda-graph-batches 0") from None
        log.warning("steps run without CUDA graphs, which cannot be captured: %s", error)
        return False
    return True
