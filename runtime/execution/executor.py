"""The model, the KV pool and the attention backend on one device, and the steps that run on them."""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from runtime.batch import ForwardBatch
from runtime.config import MOST_RUNNING, Config, ModelCode, unusable
from runtime.errors import EngineDead, ModelError
from runtime.execution.attention.backend import AttentionBackend
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.fused import open_torch_attention
from runtime.execution.attention.torch_attention import Scores
from runtime.execution.attention.windows import Window, narrowed
from runtime.execution.device import (
    choose_attention,
    choose_device,
    choose_dtype,
    flashinfer_unfit,
    is_lost,
    is_out_of_memory,
    set_current,
    wants_native,
)
from runtime.execution.flashinfer_package import COST
from runtime.execution.graphs import PROMPT_SIZES, StepGraphs
from runtime.execution.loading import load_model
from runtime.execution.native.choosing import NativeChoosing
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.native.library import Library, load_best
from runtime.execution.ops import FlashInferOps, Ops
from runtime.execution.parallel.group import RankGroup
from runtime.execution.readiness import capture_graphs, find_fault
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
from runtime.models.adapters.lora import LoraAdapter
from runtime.models.config_json import read_json
from runtime.models.implementation import is_diffusion_gemma, own_spec
from runtime.models.rope import RotaryEmbedding
from runtime.models.shards import Shard, split_spec
from runtime.models.spec import LlamaSpec, ModelSpec
from runtime.sampler_state import Choosing

log = logging.getLogger("ramet.engine")

# Torch's default, which follows $OMP_NUM_THREADS; read before an executor changes it.
ALL_THREADS = torch.get_num_threads()

# Bits of `--quantization`.
_BITS = {"int4": 4, "int8": 8}
# Slots for states within a step, beside two for each request.
_SLOTS = 8


class _Adaptable(Protocol):
    """A decoder that computes rows with adapters."""

    @property
    def adapters(self) -> dict[str, Any]: ...

    def load_adapter(self, adapter: LoraAdapter) -> None: ...


class Executor:
    """Runs `ForwardBatch`es.

    Attributes:
        backend_name: attention kernels: `native-` and an instruction set, `torch` or `flashinfer`.
        backend_note: why torch computes on a GPU in place of FlashInfer, and what this costs; empty otherwise.
        least_saved_tokens: see `AttentionBackend`.
        choosing: chooses tokens with the kernels; None: use torch.
        implementation: `ramet` or `transformers`: the code that computes the model.
        has_windows: whether some layers see only the nearest positions.
        soften: returns mean embeddings [n, hidden] of the distributions of logits [n, vocab]; only for DiffusionGemma.
        near: KV of the layers with a window, if it is in a pool of its own.
        states: recurrent states of the live requests; None: the model has no recurrent layers.
        rope, project: rotary embedding and `LlamaModel.project` for this rank's heads; not with transformers' code.
    """

    spec: ModelSpec
    has_windows = False
    near: NearPages | None = None
    states: StatePool | None = None
    _forward: Callable[[ForwardBatch], torch.Tensor]
    _decoder: _Adaptable
    rope: RotaryEmbedding
    choosing: Choosing | None = None
    project: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
    soften: Callable[[torch.Tensor], torch.Tensor] | None = None
    least_saved_tokens = AttentionBackend.least_saved_tokens
    backend_note = ""

    def __init__(self, config: Config, path: Path, group: RankGroup | None = None):
        """Load the model directory `path`, or with `group` this rank's shard. Raises ModelError."""
        self.device = choose_device(config.model) if group is None else group.device
        set_current(self.device)
        self._group = group
        self._graphs: StepGraphs | None = None
        self._windows: list[Window | None] = []
        # Whether layers with a window always form separate groups, because their rotary embedding differs.
        self._split = False
        spec = own_spec(config.model, path)
        if spec is None:
            is_diffusion = is_diffusion_gemma(read_json(path / "config.json"))
        else:
            is_diffusion = spec.diffusion is not None
        if given := unusable(config, is_diffusion):
            raise ModelError(f"--{given}: {path.name} is {'a diffusion' if is_diffusion else 'a causal'} model")
        if spec is not None and spec.needs_torch and config.model.kernels == "flashinfer":
            raise ModelError(f"--kernels flashinfer is not served with {spec.architecture}")
        self.implementation: ModelCode = "transformers" if spec is None else "ramet"
        library = None if spec is None else self._choose_kernels(config)
        if library is None and (config.model.quantization in _BITS or config.model.kernels == "native"):
            raise ModelError("--quantization int4 or int8 and --kernels native need the native kernels of a CPU")
        given = config.model.quantization
        self.quantization: str = given if given in _BITS else "none"
        self.dtype = choose_dtype(config.model, self.device, library is not None)
        self.kv_dtype = choose_kv_dtype(config.cache, self.dtype)
        if spec is None:
            self._open_transformers(config, path)
        else:
            self._open_own(config, path, spec, library)
        whose = "Ramet's own code" if spec is not None else "transformers' code, at its speed,"
        log.info("%s computes %s", whose, self.spec.architecture)

    def _open_transformers(self, config: Config, path: Path) -> None:
        # Imported here, because importing transformers is slow and Ramet's own code does not need it.
        from runtime.execution.transformers.model import TransformersModel

        if config.model.kernels == "flashinfer":
            raise ModelError("--kernels flashinfer is not served with transformers' code")
        torch.set_num_threads(config.engine.threads or ALL_THREADS)
        self._decoder = model = TransformersModel(path, config.model, self.dtype, self.device)
        self.spec = model.spec
        self.soften = model.soften
        self.context_length = choose_context_length(config.model, self.spec)
        self.pool = self._make_pool(config, self.spec)
        self.has_windows = any(window.size < self.context_length for window in model.windows)
        backend = open_torch_attention(self.pool)
        self.backend_name = backend.name
        self._note("transformers' code computes the model")
        self._forward = partial(model.forward, pool=self.pool, backend=backend, states=self.states)

    def _open_own(self, config: Config, path: Path, spec: LlamaSpec, library: Library | None) -> None:
        group = self._group
        self.context_length = choose_context_length(config.model, spec)
        backend = self._choose_attention(config, spec)
        self.spec = spec = with_near(config, spec, backend)
        share = spec if group is None else split_spec(spec, group.size)
        if spec.near_rope or any(size is not None and size < self.context_length for size in spec.windows):
            self._windows = [None if size is None else Window(size) for size in spec.windows]
            self.has_windows, self._split = True, spec.near_rope is not None
        ops = FlashInferOps(self.context_length, group) if backend == "flashinfer" else Ops(group)
        if self.device.type == "cpu":  # report a pool that is too large before reading the weights
            self._pool_pages(config, share)
        shard = None if group is None else Shard(group.rank, group.size)
        loaded = load_model(config.model, path, spec, self.dtype, self.device, ops, library is not None, shard)
        model = loaded.model
        if self.quantization == "none":
            self.quantization = loaded.quantization
        self.rope, self._decoder = model.rope, model
        graphs = self._graph_sizes(config, model.most_free_rows) if backend == "flashinfer" else []
        self.pool = self._make_pool(config, share, spare_pages=1 if graphs else 0)
        model.states = self.states
        if library is not None:
            threads, bits = config.engine.threads or ALL_THREADS, _BITS.get(config.model.quantization, 0)
            near_pool = None if self.near is None else self.near.pool
            self._decoder = native = NativeDecoder(library, model, self.pool, threads, bits, loaded.stored, near_pool)
            self.backend_name, self._forward, self.project = native.name, native.forward, native.project
            self.choosing = NativeChoosing(native.team, native.argmax)
            # After a parallel operation, torch's threads spin on the cores that the kernels use.
            torch.set_num_threads(1)
        else:
            torch.set_num_threads(config.engine.threads or ALL_THREADS)
            attention: AttentionBackend
            near = None
            if backend == "torch":
                attention = open_torch_attention(self.pool, model.rope, [Scores(sinks=one) for one in model.sinks()])
                if self.near is not None:
                    scores = [Scores(sinks=sinks) for sinks in model.sinks(near=True)]
                    near = open_torch_attention(self.near.pool, scores=scores)
            else:
                attention = FlashInferAttention(self.pool, model.rope, share.num_heads, self.dtype)
                if graphs:
                    prompts = self._prompt_sizes(config, model.most_free_rows)
                    self._graphs = StepGraphs(model, self.pool, attention, graphs, prompts, self.context_length)
                    self._capture(config.scheduler.max_running or self.max_running)
            self.backend_name = attention.name
            self.least_saved_tokens = attention.least_saved_tokens
            self._forward = partial(model.forward, pool=self.pool, backend=attention, near=near)
            self.project = model.project

    def _pool_pages(self, config: Config, spec: ModelSpec) -> tuple[int, int]:
        """Number of pages of the pool, and bytes per token."""
        per_token = bytes_per_token(config, spec, self.kv_dtype)
        return pool_pages(config.cache, per_token, self.device), per_token

    def _make_near(self, config: Config, spec: LlamaSpec, num_pages: int) -> NearPages:
        page_size = config.cache.page_size
        prompt = most_places(spec.largest_window, page_size)  # beside the ends of conversations, one that is prefilled
        count = min(math.ceil(num_pages * near_share(config, spec)) + prompt, num_pages)
        shape = (len(spec.near), count, page_size, spec.num_kv_heads, spec.head_dim)
        return NearPages(KVPool(*shape, self.kv_dtype, self.device), num_pages)

    def _make_pool(self, config: Config, spec: ModelSpec, spare_pages: int = 0) -> KVPool:
        cache = config.cache
        num_pages, per_token = self._pool_pages(config, spec)
        if self._group is not None:
            num_pages = self._group.least(num_pages)
        shape = (spec.kv_layers, num_pages, cache.page_size, spec.num_kv_heads, spec.head_dim)
        try:
            if spec.states:
                slots = 2 * (config.scheduler.max_running or self.max_running) + _SLOTS
                self.states = StatePool(spec.states, slots, self.device, spec.records)
            if isinstance(spec, LlamaSpec) and spec.near:
                self.near = self._make_near(config, spec, num_pages)
            return KVPool(*shape, self.kv_dtype, self.device, spare_pages, spec.halves)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            size = num_pages * cache.page_size * per_token / (1 << 30)
            raise ModelError(
                f"the KV pool of {size:.1f} GiB does not fit: lower --pool-tokens or --pool-memory"
            ) from None

    def _choose_kernels(self, config: Config) -> Library | None:
        if not wants_native(config, self.device):
            return None
        library = load_best()
        if library is None:
            log.warning(
                "the native CPU kernels were not built for this version (no C++20 compiler?) or there is no AVX2; "
                "torch computes instead, several times slower"
            )
        return library

    def _graph_sizes(self, config: Config, most_rows: float) -> list[int]:
        """Rows of the CUDA graphs of decode steps, up to `most_rows`; empty with several ranks, and for diffusion."""
        if self._group is not None or self.spec.diffusion is not None:
            return []
        sizes = {int(size) for size in config.engine.cuda_graph_batches.split(",") if size}
        return sorted(size for size in sizes if 0 < size <= most_rows)

    def _prompt_sizes(self, config: Config, most_rows: float) -> list[int]:
        """Rows of the CUDA graphs of steps with prompts, up to `most_rows`, and up to what a step may have."""
        most = bisect_left(PROMPT_SIZES, config.scheduler.step_tokens or self.step_tokens) + 1
        return [size for size in PROMPT_SIZES[:most] if size <= most_rows]

    def _choose_attention(self, config: Config, spec: LlamaSpec) -> str:
        """The backend for a model of Ramet's own code. FlashInfer must first compute one step of each kind.

        Raises ModelError if `--kernels flashinfer` cannot be had, or if a failed kernel has made the GPU unusable.
        """
        if spec.needs_torch:
            self._note(f"FlashInfer does not compute {spec.architecture}")
            return "torch"
        backend = choose_attention(config.model, self.device, self.dtype, spec.head_dim)
        if backend == "torch":
            if (why := flashinfer_unfit(self.device, self.dtype, spec.head_dim)) is not None:
                self._note(why)
            else:
                self._note(f"--kernels {config.model.kernels}", logging.INFO)
            return backend
        share, quiet = (spec, False) if self._group is None else (split_spec(spec, self._group.size), True)
        dtypes = self.dtype, self.kv_dtype
        fault = find_fault(share, *dtypes, config.cache.page_size, self.device, quiet)
        if fault is None:
            return backend
        if config.model.kernels == "flashinfer":
            raise ModelError(f"--kernels flashinfer: {fault}")
        if is_lost(self.device):
            raise ModelError(f"{fault}. The GPU cannot be used any more; start with --kernels torch")
        self._note(fault)
        return "torch"

    def _note(self, why: str, level: int = logging.WARNING) -> None:
        """Say in the log and in `backend_note` why torch computes in place of FlashInfer, if this is a GPU."""
        if self.device.type != "cpu":
            self.backend_note = f"{why}. {COST[0].upper()}{COST[1:]}"
            log.log(level, "torch computes attention, not FlashInfer: %s", self.backend_note)

    def _capture(self, most: int) -> None:
        """Capture the graphs of steps of up to `most` requests. If this fails, steps run without graphs.

        Raises ModelError if the failure has made the GPU unusable.
        """
        if self.device.type == "cpu" or self._graphs is None:
            return
        try:
            capture_graphs(self._graphs, most, self.device)
        except Exception as error:  # of the driver, the allocator or a kernel
            if is_lost(self.device):
                raise ModelError(f"a CUDA graph cannot be captured ({error}): --cuda-graph-batches 0") from None
            log.warning("steps run without CUDA graphs, which cannot be captured: %s", error)
            self._graphs = None

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load an adapter for later steps. Raises ModelError if it does not fit the model."""
        if self._group is not None or self.spec.diffusion is not None or self.spec.states:
            where = "a diffusion model" if self.spec.diffusion is not None else "recurrent layers"
            where = "several ranks" if self._group is not None else where
            raise ModelError(f"adapters are not served with {where}")
        if adapter.digest not in self._decoder.adapters:
            self._decoder.load_adapter(adapter)

    def drop_adapter(self, digest: str) -> None:
        """Unload an adapter. No later step may use it."""
        self._decoder.adapters.pop(digest, None)

    @property
    def step_tokens(self) -> int:
        """Default for the largest number of rows in a step.

        On a CPU, 256 rows are nearly as efficient as more rows, and decoding requests wait less for prompts.
        """
        return 2048 if self.device.type == "cuda" else 256

    @property
    def max_running(self) -> int:
        """Default for the most running requests."""
        return MOST_RUNNING if self.device.type == "cuda" else 64

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step. Returns float32 logits [S, vocab] of `batch.logits_rows`, valid until the next step.

        Raises ValueError for a position outside the context, where FlashInfer would read past its table of angles.
        """
        if (last := int(batch.positions.numpy().max())) >= self.context_length:
            raise ValueError(f"position {last} is outside a context of {self.context_length}")
        if self.device.type != "cpu":
            set_current(self.device)
        is_split = self._split or self.near is not None
        if self._windows and (is_split or last >= min(window.size for window in self._windows if window)):
            batch = narrowed(batch, self._windows, self.pool.page_size, self.near)
        logits = None if self._graphs is None or batch.adapters else self._graphs.run(batch)
        return self._forward(batch) if logits is None else logits

    def on_death(self, call: Callable[[EngineDead], None]) -> None:
        """Register a callback for the case that the process of another rank ends before `close`; runs on a thread."""

    def close(self) -> None:
        """End the processes of other ranks."""
