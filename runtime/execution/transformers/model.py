"""Decoders in transformers' modelling code, with attention over the paged pool."""

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from runtime.batch import AdapterRows, AttentionPlan, ForwardBatch, LayerGroup, Span, StateRows, causal_visible
from runtime.config import ModelConfig
from runtime.errors import ModelError
from runtime.execution.attention.fused import open_torch_attention
from runtime.execution.attention.torch_attention import TorchAttention
from runtime.execution.attention.windows import Window, within
from runtime.execution.transfers import upload
from runtime.execution.transformers.adapters import HookedAdapters
from runtime.execution.transformers.diffusion_gemma import DiffusionGemma
from runtime.execution.transformers.interface import NAME, LayerCall, attention
from runtime.execution.transformers.stateful import probing, stateful_layers, states_of
from runtime.kv.pool import KVPool
from runtime.kv.states import StatePool
from runtime.models.adapters.lora import LoraAdapter, LowRank
from runtime.models.config_json import read_generation, read_json, token_ids
from runtime.models.implementation import DIFFUSION_GEMMA, is_diffusion_gemma
from runtime.models.spec import ModelSpec
from runtime.models.weights import find_weights

# Layer types that keep a state in place of keys and values, as configurations spell them.
_STATEFUL = ("linear", "mamba", "recurrent", "conv", "rwkv")
# Rotary embeddings whose frequencies change with the sequence length, so that cached keys would become wrong.
_VARYING_ROPE = ("dynamic",)
_NO_ATTENTION = "all of its layers keep recurrent state; supported are models that also have layers of attention"
_NO_INTERFACE = "its attention does not go through transformers' attention interface"
# Fields of a configuration that do not affect the computation.
_NAMES = ("_name_or_path", "transformers_version")
# Largest error of the checked logits as a share of their spread: in float32, and in smaller types.
_MOST_ERROR, _MOST_ERROR_HALF = 1e-3, 0.2


@dataclass(slots=True)
class _Shapes:
    """Collects the layers' shapes in a forward pass: (query heads, key-value heads, head size) by layer index."""

    found: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    windows: set[Window] = field(default_factory=set)

    def attend(self, layer: LayerCall) -> torch.Tensor:
        index, q, k, v = getattr(layer.module, "layer_idx", None), layer.q, layer.k, layer.v
        if index is None or index in self.found:
            raise NotImplementedError("its layers of attention are not numbered one by one")
        self.found[index] = (q.shape[1], k.shape[1], max(k.shape[2], v.shape[2]))
        if layer.window is not None:
            self.windows.add(layer.window)
        return v.new_zeros(*q.shape[:2], v.shape[2])


@dataclass(slots=True)
class _Step:
    """The attention of one step.

    Attributes:
        places: the layer of the pool for each attention module, by its `layer_idx`.
        slots: int64 [n], pool slots to write.
        written: int64 [n], the row that writes each slot; None: all rows, in order.
        prepared: for each window, the narrowed plan, prepared by `backend`.
    """

    places: dict[int, int]
    pool: KVPool
    backend: TorchAttention
    plan: AttentionPlan
    positions: torch.Tensor
    slots: torch.Tensor
    written: torch.Tensor | None
    prepared: dict[Window | None, Any] = field(default_factory=dict)

    def attend(self, layer: LayerCall) -> torch.Tensor:
        module, q, k, v, window, scores = layer
        if window is not None and int(self.positions.max()) < window.size:
            window = None
        if window not in self.prepared:
            plan = self.plan
            if window is not None:
                plan = within(plan, self.positions.numpy(), window, self.pool.page_size)
            self.prepared[window] = self.backend.prepare(plan)
        place, (kv_heads, head_dim) = self.places[int(module.layer_idx)], self.pool.k.shape[2:]  # type: ignore[arg-type]
        dim = v.shape[2]
        k, v = (F.pad(x, (0, head_dim - x.shape[2], 0, kv_heads - x.shape[1])) for x in (k, v))
        if self.written is not None:
            k, v = k[self.written], v[self.written]
        self.pool.write(place, self.slots, k, v)
        q = F.pad(q, (0, head_dim - q.shape[2])).contiguous()
        return self.backend.run(self.prepared[window], q, place, scores)[..., :dim]


class TransformersModel:
    """A decoder in transformers' modelling code. The rows of a step form one sequence with explicit positions.

    Attributes:
        spec: the shapes of the model.
        windows: the different windows of its layers.
        soften: returns mean embeddings [n, hidden] of the distributions of logits [n, vocab]; None: the model is not
            DiffusionGemma.
    """

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        """Load a model directory and compare its logits with transformers' own attention. Raises ModelError."""
        given, generation = read_json(path / "config.json"), read_generation(path)
        is_gemma = is_diffusion_gemma(given)
        settings, self._model = _load(path, config, dtype, device)
        name = type(self._model).__name__
        if is_gemma:
            settings, self._model = settings.text_config, DiffusionGemma(self._model)
        self.soften = self._model.soften if is_gemma else None
        self._device, self._dtype = device, dtype
        self._adapters = HookedAdapters(self._model)
        text = getattr(settings, "text_config", settings)
        self._stateful = stateful_layers(self._model)
        taken = inspect.signature(self._model.forward).parameters
        self._takes_rows = "logits_to_keep" in taken
        # Layers with states would wait for the mask.
        self._takes_mask = "attention_mask" in taken and not self._stateful
        with _refusing(name):
            _refuse_unknown_states(name, text, bool(self._stateful))
            with probing(self._stateful, text):
                shapes, vocab_size = self._probe()
            self.windows = shapes.windows
            most = [max(sizes) for sizes in zip(*shapes.found.values(), strict=True)]
            self._places = {index: place for place, index in enumerate(sorted(shapes.found))}
            self.spec = ModelSpec(
                architecture=name,
                model_type=settings.model_type,
                hidden_size=settings.hidden_size,
                num_layers=len(self._places),
                num_heads=most[0],
                num_kv_heads=most[1],
                head_dim=most[2],
                vocab_size=vocab_size,
                context_length=_context(settings),
                eos_token_ids=token_ids(settings.eos_token_id, generation.get("eos_token_id")),
                fingerprint=_fingerprint(settings),
                sees="blocks of 1" if is_gemma else "causal",
                states=tuple(shape for layer in self._stateful for shape in layer.shapes),
                num_stateful=len(self._stateful),
            )
            self._check()

    @property
    def adapters(self) -> dict[str, dict[str, LowRank]]:
        """By digest of the adapter, its factors by module."""
        return self._adapters.loaded

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load an adapter and run it once as a test. Raises ModelError if it does not fit the model."""
        self._adapters.load(adapter, self._dtype, self._device)
        self._adapters.rows, self._adapters.num_rows = [AdapterRows(adapter.digest, 0, 2)], 2
        try:
            with _refusing(self.spec.architecture):
                self._probe()
        except ModelError:
            del self.adapters[adapter.digest]
            raise
        finally:
            self._adapters.rows = ()

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: KVPool, backend: TorchAttention, states: StatePool | None = None
    ) -> torch.Tensor:
        """Run one step with a single layer group: write new K and V; returns float32 logits of `logits_rows`.

        `states`: pool of the layers with recurrent states, if there are any.
        """
        (group,) = batch.groups
        assert group.rows is None
        assert not group.load or self.soften is not None
        assert not group.save
        positions = batch.positions.clone() if group.load else batch.positions
        for canvas in group.load:
            # All rows of a canvas have the window of its first row.
            positions[canvas.rows] = int(positions[canvas.rows[0]])
        written = None if bool((group.kv_write >= 0).all()) else (group.kv_write >= 0).nonzero()[:, 0]
        slots = group.kv_write if written is None else group.kv_write[written]
        step = _Step(
            self._places,
            pool,
            backend,
            group.attention,
            positions,
            upload(slots, self._device),
            None if written is None else upload(written, self._device),
        )
        token = attention.set(step.attend)
        self._adapters.rows, self._adapters.num_rows = batch.adapters, len(batch.tokens)
        self._model.canvases = group.load
        try:
            with states_of(batch.states, states):
                return self._logits(batch.tokens, batch.positions, batch.logits_rows)
        finally:
            self._adapters.rows = self._model.canvases = ()
            attention.reset(token)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        tokens, positions, rows = (upload(each, self._device) for each in (tokens, positions, rows))
        options = {"logits_to_keep": rows} if self._takes_rows else {}
        if self._takes_mask:
            # Without a mask, transformers waits for the device to see whether the positions are those of one sequence.
            options["attention_mask"] = torch.ones_like(tokens, dtype=torch.bool)[None]
        found = self._model(tokens[None], position_ids=positions[None], use_cache=False, **options).logits[0]
        return found.float() if self._takes_rows else found[rows].float()

    @torch.inference_mode()
    def _probe(self) -> tuple[_Shapes, int]:
        """Run two tokens to find the layers' shapes and the number of logits per row."""
        shapes, rows = _Shapes(), torch.arange(2)
        token = attention.set(shapes.attend)
        try:
            found = self._logits(rows, rows, rows).shape[-1]
        finally:
            attention.reset(token)
        if not shapes.found:
            raise NotImplementedError(_NO_ATTENTION if self._stateful else _NO_INTERFACE)
        return shapes, found

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare the logits of two sequences, one of them in two chunks, with transformers' own attention.

        The comparison fails for a model that ignores positions, or whose rows interact outside of attention.
        """
        draw = torch.Generator().manual_seed(0)
        most = self.spec.context_length
        one, other = (torch.randint(self.spec.vocab_size, (min(n, most),), generator=draw) for n in (20, 9))
        cut, total = len(one) // 2, len(one) + len(other)
        shape = (self.spec.num_layers, total, 1, self.spec.num_kv_heads, self.spec.head_dim)
        pool = KVPool(*shape, self._dtype, self._device)
        backend = open_torch_attention(pool)
        states = StatePool(self.spec.states, 2, self._device, self.spec.records) if self._stateful else None
        self.forward(_batch([(one[:cut], 0, 0)]), pool, backend, states)
        ours = self.forward(_batch([(one[cut:], cut, 0), (other, 0, len(one))]), pool, backend, states)
        self._model.set_attn_implementation("eager")
        try:
            every = [
                self._logits(tokens, torch.arange(len(tokens)), torch.arange(len(tokens))) for tokens in (one, other)
            ]
        finally:
            self._model.set_attn_implementation(NAME)
        wanted = torch.cat((every[0][cut:], every[1]))
        error = ((ours - wanted).norm(dim=-1) / (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)).mean()
        if not error < (_MOST_ERROR if self._dtype == torch.float32 else _MOST_ERROR_HALF):
            raise NotImplementedError(
                f"its logits over pages are not those of its own attention (error {float(error):.3g}): it uses "
                "positions, or other rows, elsewhere"
            )


def _batch(runs: list[tuple[torch.Tensor, int, int]]) -> ForwardBatch:
    """A step over runs (tokens, first position, first pool row of the sequence)."""
    plan = AttentionPlan(sum(len(tokens) for tokens, _, _ in runs))
    row, states = 0, []
    for slot, (tokens, position, first) in enumerate(runs):
        length = position + len(tokens)
        states.append(StateRows(row, row + len(tokens), slot, slot))
        span = Span(np.arange(first, first + length, dtype=np.int32), length)
        plan.add(slice(row, row + len(tokens)), span, causal_visible(length, len(tokens)))
        row += len(tokens)
    positions = torch.cat([torch.arange(position, position + len(tokens)) for tokens, position, _ in runs])
    slots = positions + torch.cat([torch.full((len(tokens),), first) for tokens, _, first in runs])
    group = LayerGroup(range(1), None, slots, plan)
    tokens = torch.cat([tokens for tokens, _, _ in runs])
    return ForwardBatch(tokens, positions, [group], torch.arange(row), states=states)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn every exception of a model's code into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except NotImplementedError as error:
        raise ModelError(f"{name} cannot be served: {error}") from None
    except KeyError as error:
        # Older modelling code looks up its attention class by the name of the implementation.
        reason = _NO_INTERFACE if error.args == (NAME,) else f"KeyError: {error}"
        raise ModelError(f"{name} cannot be served: {reason}") from None
    except Exception as error:
        raise ModelError(f"{name} cannot be served: {type(error).__name__}: {error}") from error


def _load(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[transformers.PretrainedConfig, Any]:
    """Load configuration and model, from safetensors only, in `dtype` on `device`. Raises ModelError."""
    given = read_json(path / "config.json")
    name = (given.get("architectures") or ["(none named)"])[0]
    if name not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), DIFFUSION_GEMMA):
        remote = "; its own code in the checkpoint is never run" if given.get("auto_map") else ""
        raise ModelError(
            f"the model's architecture is {name}, no decoder that transformers {transformers.__version__} knows{remote}"
        )
    kind = getattr(transformers, name)
    with _refusing(name):
        settings = kind.config_class.from_pretrained(path, local_files_only=True)
        _refuse_varying(getattr(settings, "text_config", settings))
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": NAME}
        if config.random_weights:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return settings, kind._from_config(settings, **options).eval().to(device)
        find_weights(path)
        if not sys.stderr.isatty():
            disable_progress_bar()
        # Tensors of a wrong shape are listed in the report instead of raising an error.
        options |= {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": True}
        if name == DIFFUSION_GEMMA:  # which refuses a generation_config.json with fields that it does not know
            options["generation_config"] = kind.generation_config_class()
        model, report = kind.from_pretrained(path, config=settings, output_loading_info=True, **options)
        missing = sorted(report["missing_keys"]) + sorted(str(each[0]) for each in report["mismatched_keys"])
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"the checkpoint in {path} has no tensor {missing[0]}{more} of the shape that is needed")
        return settings, model.eval().to(device)


def _refuse_unknown_states(name: str, settings: transformers.PretrainedConfig, are_known: bool) -> None:
    types = [*(getattr(settings, "layer_types", None) or []), *(getattr(settings, "layers_block_type", None) or [])]
    if not are_known and (found := [kind for kind in types if any(word in kind for word in _STATEFUL)]):
        raise ModelError(f"{name} keeps recurrent state in layers of type {found[0]}, outside transformers' caches")


def _refuse_varying(settings: transformers.PretrainedConfig) -> None:
    if varying := [rope["rope_type"] for rope in _ropes(settings) if rope.get("rope_type") in _VARYING_ROPE]:
        raise ModelError(f"the model's rope scaling is {varying[0]!r}, which changes keys as a sequence grows")


def _ropes(settings: transformers.PretrainedConfig) -> list[dict[str, Any]]:
    """Parameters of the rotary embeddings: one for all layers, or one for each layer type."""
    given = getattr(settings, "rope_parameters", None) or {}
    several = [rope for rope in given.values() if isinstance(rope, dict)]
    return several or [given]


def _fingerprint(settings: transformers.PretrainedConfig) -> str:
    fields = {name: value for name, value in settings.to_dict().items() if name not in _NAMES}
    return f"transformers {json.dumps(fields, sort_keys=True, default=str)}"


def _context(settings: transformers.PretrainedConfig) -> int:
    """The context length. longrope changes its frequencies beyond the original context, so the context ends there."""
    context = getattr(settings, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise ModelError("config.json has no max_position_embeddings")
    longrope = [rope for rope in _ropes(settings) if rope.get("rope_type") == "longrope"]
    return min([context, *(rope["original_max_position_embeddings"] for rope in longrope)])
