"""The decoder in native kernels: packed weights, and one call per step."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runtime.batch import AdapterRows, AttentionPlan, ForwardBatch, HiddenRows, StateRows
from runtime.execution import torch_decoder
from runtime.execution.adapters import fuse, rows_within
from runtime.execution.mixers.attention import Attention
from runtime.execution.mixers.mixer import KVMixer, Mixer
from runtime.execution.native import library as c
from runtime.execution.native.library import Library
from runtime.execution.native.packed import PackedWeights, Team, describe, packed_bytes
from runtime.execution.native.plan import NativePlan
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import DecoderSpec

if TYPE_CHECKING:
    from runtime.execution.experts import Experts
    from runtime.execution.native.experts import NativeExperts
    from runtime.execution.native.latent import PackedLatent
    from runtime.execution.native.stored import StoredMatrices
    from runtime.models.adapters.lora import LoraAdapter
    from runtime.models.stored import StoredTensors


def _check_states(states: torch.Tensor, shape: tuple[int, int]) -> None:
    if states.shape != shape or states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError(f"hidden states must be contiguous float32 {shape}, not {states.dtype} {(*states.shape,)}")


class NativeDecoder:
    """The decoder stack and head over a paged pool on the CPU.

    Weights and pool are float32 or bfloat16, or weights are codes of 4 to 8 bits. Arithmetic is float32, with two
    exceptions. Kernels that multiply pairs of bfloat16 round activations, queries and attention weights to bfloat16 if
    the other factor is bfloat16. For codes, activations are rounded to 8 bits, with a scale for each 16 or 32 values of
    a row.

    Attributes:
        name: `native-`, the instruction set, and `-int8` if it applies.
        adapters: loaded adapters by digest.
        experts: of the layers that have them, in order.
    """

    def __init__(
        self,
        library: Library,
        model: torch_decoder.TorchDecoder,
        pool: KVPool,
        threads: int,
        bits: int = 0,
        stored: tuple[StoredTensors, Path] | None = None,
        near: KVPool | None = None,
    ) -> None:
        """Pack the weights of `model` and delete the originals.

        Args:
            bits: 4 or 8 rounds the matrices to codes of that size; 0 keeps them.
            stored: quantised tensors, and the directory of their packed file. Matrices of `model` are the places of
                their rows.

        Raises:
            MemoryError: if the packed weights do not fit into memory.
        """
        self.name = f"native-{library.isa}" + (f"-int{bits}" if bits else f"-{stored[0].name}" if stored else "")
        self.library, self._bits = library, bits
        self.spec, self.rope, self.pool, self._states = model.spec, model.rope, pool, model.states
        self._near = near
        self._dtype = model.embedding.dtype
        self.adapters: dict[str, PackedAdapter] = {}
        self.team = Team(library, threads)
        self._stored: StoredMatrices | None = None
        if stored is not None:
            from runtime.execution.native.stored import StoredMatrices

            self._stored = StoredMatrices(self.team, model, *stored)
        self._weights = PackedWeights(self.team, 0 if stored else _model_bytes(library, model, bits))
        self._layers = (c.LayerStruct * self.spec.num_layers)()
        self._latents: list[PackedLatent] = []
        self.experts: list[NativeExperts] = []
        for index in range(self.spec.num_layers):
            self._layers[index] = self._pack_layer(model.layers[index], index)
            model.layers[index] = None  # type: ignore[call-overload]
        self._model = self._describe_model(model)
        del model.layers, model.head, model.embedding
        self._handle = library.decoder_create(ctypes.byref(self._model), self.team.handle)
        self._finalizer = weakref.finalize(self, library.decoder_destroy, self._handle)
        self._logits = torch.empty(0, self.spec.vocab_size)
        self._plans: list[NativePlan] = []
        self._near_rope = model.near_rope
        # Tables of cos and sin by position, for each rotary embedding.
        self._angles: dict[RotaryEmbedding, tuple[np.ndarray, np.ndarray]] = {}

    def _pack_layer(self, layer: torch_decoder.Layer, index: int) -> c.LayerStruct:
        pack, mixer = self._weights, layer.mixer
        parts = c.LayerStruct(
            input_norm=self._float(layer.input_norm),
            post_norm=self._float(layer.post_norm),
            o_norm=self._float(layer.o_norm),
            down_norm=self._float(layer.down_norm),
        )
        add = partial(pack.add, bits=self._bits)
        if mixer.inputs is not None and self._stored is None:
            parts.inputs[0] = add(mixer.inputs, mixer.inputs_bias)
        if isinstance(mixer, KVMixer):
            pool = self._near if self._near is not None and index in self.spec.near else self.pool
            parts.kv.k, parts.kv.v = pool.k[mixer.place].data_ptr(), pool.v[mixer.place].data_ptr()
        if isinstance(mixer, Attention):
            parts.q_norm, parts.k_norm = self._float(mixer.q_norm), self._float(mixer.k_norm)
            parts.kv.sinks = self._float(mixer.sinks)
        else:
            self._pack_other(mixer, parts)
        if layer.experts is not None:
            self._pack_experts(layer, layer.experts, index, parts)
        if self._stored is not None:
            self._link_layer(layer, index, parts)
        else:
            parts.o = add(layer.o, layer.o_bias)
            if layer.experts is None:
                parts.gate_up = add(layer.gate_up, layer.gate_up_bias, paired=True)
                parts.down = add(layer.down, layer.down_bias)
        return parts

    def _pack_other(self, mixer: Mixer, parts: c.LayerStruct) -> None:
        """Pack latent attention, or a recurrent layer."""
        if isinstance(mixer, KVMixer):
            from runtime.execution.native.latent import PackedLatent

            self._latents.append(PackedLatent(self.team, mixer, self.spec.hidden_size, self._bits))
            parts.latent = ctypes.pointer(self._latents[-1].struct)
        else:
            from runtime.execution.native.recurrence import layer_state

            assert self._states is not None
            parts.state = layer_state(mixer, self._states, self._weights.keep)

    def _pack_experts(self, layer: torch_decoder.Layer, experts: Experts, index: int, parts: c.LayerStruct) -> None:
        from runtime.execution.native.experts import NativeExperts

        stored = None if self._stored is None else self._stored.experts(index)
        shared = layer.gate_up, layer.down
        one = NativeExperts(experts, self.team, self._bits, shared, layer.shared_gate, stored)
        self.experts.append(one)
        parts.experts = ctypes.pointer(one.struct)

    def _link_layer(self, layer: torch_decoder.Layer, index: int, parts: c.LayerStruct) -> None:
        """Use the stored matrices."""
        mixer = layer.mixer
        assert self._stored is not None
        inputs, parts.o, parts.gate_up, parts.down = self._stored.layer(index)
        bias = mixer.inputs_bias
        biases = [None] * len(inputs) if bias is None else bias.split([w.n for w in inputs])
        given = [*zip(inputs, biases, strict=True), (parts.o, layer.o_bias), (parts.gate_up, layer.gate_up_bias)]
        for matrix, bias in (*given, (parts.down, layer.down_bias)):
            matrix.bias = self._weights.keep_bias(matrix, bias)
        parts.inputs = (c.Matrix * 4)(*inputs)

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Pack an adapter in the model's dtype, even beside codes. Raises ModelError if it does not fit the model."""
        self.adapters[adapter.digest] = PackedAdapter(self.team, adapter, self.spec, self._dtype)

    def _float(self, weight: torch.Tensor | None) -> int | None:
        return None if weight is None else self._weights.keep(weight.float())

    def _describe_model(self, model: torch_decoder.TorchDecoder) -> c.Model:
        spec, pool, stored = self.spec, self.pool, self._stored
        head = self._weights.add(model.head, bits=_head_bits(self._bits)) if stored is None else stored.head
        is_table = stored is not None or spec.tie_embeddings
        return c.Model(
            hidden=spec.hidden_size,
            inner=spec.intermediate_size,
            vocab=spec.vocab_size,
            num_layers=spec.num_layers,
            eps=spec.rms_norm_eps,
            embedding_scale=model.embedding_scale,
            gate=c.GELU if spec.activation == "gelu" else c.SILU,
            shape=c.Shape(
                heads=spec.num_heads,
                kv_heads=spec.num_kv_heads,
                dim=spec.head_dim,
                page_size=pool.page_size,
                is_bf16=pool.k.dtype == torch.bfloat16,
            ),
            is_gated=spec.gated,
            recurrence=self._describe_recurrence(),
            layers=self._layers,
            norm=self._float(model.norm),
            head=head,
            # A tied embedding is read from the packed head.
            table=head if stored is None else stored.table,
            embedding=None if is_table else self._weights.keep(model.embedding),
            embedding_is_bf16=model.embedding.dtype == torch.bfloat16,
        )

    def _describe_recurrence(self) -> c.RecurrenceShape:
        """Zeros if there are no recurrent layers."""
        if self.spec.recurrence is None:
            return c.RecurrenceShape()
        from runtime.execution.native.recurrence import describe_recurrence

        return describe_recurrence(self.spec.recurrence)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write new K and V into the pool and return float32 logits [S, vocab] of `logits_rows`.

        The next step overwrites the logits, because allocating new memory in each step would cost too much.
        """
        kept: list[Any] = []

        def pointer(tensor: torch.Tensor) -> int:
            kept.append(tensor if tensor.is_contiguous() else tensor.contiguous())
            return kept[-1].data_ptr()

        def hidden_rows(given: list[HiddenRows]) -> Any:
            if not given:
                return None
            several = (c.HiddenRowsStruct * len(given))()
            for to, one in zip(several, given, strict=True):
                # Not `pointer`, which may copy: the kernel writes into the caller's tensor.
                _check_states(one.states, (len(one.rows), self.spec.hidden_size))
                to.rows, to.num_rows, to.states = pointer(one.rows), len(one.rows), one.states.data_ptr()
                to.adds = one.adds
            kept.append(several)
            return several

        groups = (c.GroupStruct * len(batch.groups))()
        every = batch.positions if batch.axes is None else batch.axes
        for to, group in zip(groups, batch.groups, strict=True):
            positions = every if group.rows is None else every[group.rows]
            cosine, sine = self._turns(positions, group.layers.start)
            plan = self._native_plan(group.attention)
            kept.append(plan)
            to.first_layer, to.last_layer = group.layers.start, group.layers.stop
            to.rows = None if group.rows is None else pointer(group.rows)
            to.num_rows = positions.shape[0]
            to.kv_write = pointer(group.kv_write)
            kept += cosine, sine
            to.cosine, to.sine = cosine.ctypes.data, sine.ctypes.data
            to.spans, to.edges, to.num_edges = plan.spans, plan.edges, plan.num_edges
            to.load, to.num_load = hidden_rows(group.load), len(group.load)
            to.save, to.num_save = hidden_rows(group.save), len(group.save)
            if batch.adapters:
                rows = rows_within(batch.adapters, group.rows)
                to.adapted, to.num_adapted = self._adapted(rows), len(rows)
        num_logits = batch.logits_rows.shape[0]
        if self._logits.shape[0] < num_logits:
            self._logits = torch.empty(num_logits, self.spec.vocab_size)
        logits = self._logits[:num_logits]
        step = c.StepStruct(
            tokens=pointer(batch.tokens),
            num_rows=batch.tokens.shape[0],
            groups=groups,
            num_groups=len(batch.groups),
            states=_state_rows(batch.states, kept) if batch.states else None,
            num_states=len(batch.states),
            logits_rows=pointer(batch.logits_rows),
            num_logits=num_logits,
            logits=logits.data_ptr(),
        )
        self.library.decoder_forward(self._handle, ctypes.byref(step))
        return logits

    def _adapted(self, adapters: list[AdapterRows]) -> Any:
        several = (c.AdaptedStruct * len(adapters))()
        for to, rows in zip(several, adapters, strict=True):
            adapter = self.adapters[rows.digest]
            to.layers, to.most_rank, to.first, to.stop = adapter.layers, adapter.most_rank, rows.first, rows.stop
        return several

    def _turns(self, positions: torch.Tensor, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """`RotaryEmbedding.cos_sin` for a layer, from a table that grows with the largest position."""
        is_near = bool(self.spec.windows) and self.spec.windows[layer] is not None
        rope, index = self._near_rope if is_near else self.rope, positions.numpy()
        if rope not in self._angles or int(index.max()) >= len(self._angles[rope][0]):
            every = rope.cos_sin(torch.arange(1 << int(index.max()).bit_length()))
            self._angles[rope] = every[0].numpy(), every[1].numpy()
        cosines, sines = self._angles[rope]
        if index.ndim == 2:
            at = np.ascontiguousarray(index[:, rope.axes.numpy()]), np.arange(len(rope.axes))
            return np.ascontiguousarray(cosines[at]), np.ascontiguousarray(sines[at])
        return cosines[index], sines[index]

    def _native_plan(self, plan: AttentionPlan) -> NativePlan:
        """The plan for the kernels, from a cache of two: plans of the same version only have longer spans."""
        for known in self._plans:
            if known.version == plan.version != 0:
                known.grow(plan)
                return known
        self._plans = [*self._plans[-1:], NativePlan(plan, self.rope)]
        return self._plans[-1]

    def project(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `TorchDecoder.project`."""
        spec = self.spec
        cosine, sine = (part.contiguous() for part in self.rope.cos_sin(positions))
        states = states.contiguous()
        out = torch.empty(len(states), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        wanted = c.Projection(
            layer=layer,
            num_rows=len(states),
            states=states.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            out=out.data_ptr(),
        )
        self.library.decoder_project(self._handle, ctypes.byref(wanted))
        return out

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Choosing`."""
        logits = logits.contiguous()
        out = np.empty(len(logits), dtype=np.int64)
        self.library.argmax(self.team.handle, logits.data_ptr(), *logits.shape, out.ctypes.data)
        # A Python loop, because CPU caches are cold after a step: one torch or numpy operation takes as long as dozens
        # of iterations.
        rows = logits.numpy()
        for row, token in enumerate(out.tolist()):
            if not math.isfinite(rows.item(row, token)):
                out[row] = -1
        return torch.from_numpy(out)


def _state_rows(states: Sequence[StateRows], kept: list[Any]) -> Any:
    """A ctypes array; what it points to is added to `kept`."""
    several = (c.StateRowsStruct * len(states))()
    for to, one in zip(several, states, strict=True):
        saves = (c.Save * len(one.saves))(*(c.Save(*save) for save in sorted(one.saves)))
        to.first, to.stop, to.slot, to.target = one.first, one.stop, one.slot, one.target
        to.draft, to.accepted = one.draft, one.accepted
        to.saves, to.num_saves = saves, len(saves)
        kept.append(saves)
    kept.append(several)
    return several


def _model_bytes(library: Library, model: torch_decoder.TorchDecoder, bits: int) -> int:
    weights = []
    for layer in model.layers:
        if layer.mixer.inputs is not None:
            weights.append((layer.mixer.inputs, False))
        weights.append((layer.o, False))
        if layer.experts is None:
            weights += [(layer.gate_up, True), (layer.down, False)]
    head = packed_bytes(library, describe(model.head, bits=_head_bits(bits)))
    return head + sum(packed_bytes(library, describe(weight, paired, bits)) for weight, paired in weights)


def _head_bits(bits: int) -> int:
    """Fewer than 8 bits cost most in the head, which is also the embedding of tied models."""
    return 8 if bits else 0


class PackedAdapter:
    """A low-rank adapter for the kernels.

    Attributes:
        layers: ctypes array of `library.AdapterLayer`.
        most_rank: the largest rank of its fused products.
    """

    def __init__(self, team: Team, adapter: LoraAdapter, spec: DecoderSpec, dtype: torch.dtype):
        """Raises ModelError."""
        fused = fuse(adapter, spec)
        found = [
            (index, product, name, getattr(one, name).to(dtype))
            for index, layer in enumerate(fused)
            for product, one in layer.items()
            for name in ("a", "b")
        ]
        sizes = [packed_bytes(team.library, describe(w, _is_paired(*place))) for _, *place, w in found]
        self._weights = PackedWeights(team, sum(sizes))
        self.layers = (c.AdapterLayer * spec.num_layers)()
        for index, product, name, weight in found:
            matrix = self._weights.add(weight, paired=_is_paired(product, name))
            setattr(getattr(self.layers[index], product), name, matrix)
        self.most_rank = max(len(one.a) for layer in fused for one in layer.values())


def _is_paired(product: str, name: str) -> bool:
    return product == "gate_up" and name == "b"
