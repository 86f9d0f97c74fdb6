"""The decoder in native kernels: packed weights, and one call per step, or one per layer in models with experts."""

from __future__ import annotations

import ctypes
import math
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from runtime.batch import AdapterRows, AttentionPlan, ForwardBatch, HiddenRows
from runtime.execution import llama
from runtime.execution.adapters import fuse, rows_within
from runtime.execution.attention.paged_index import rows_of
from runtime.execution.native import library as c
from runtime.execution.native.experts import NativeExperts
from runtime.execution.native.library import Library
from runtime.execution.native.packed import PackedWeights, Team, describe, packed_bytes
from runtime.execution.native.stored import StoredMatrices
from runtime.kv.pool import KVPool
from runtime.models.adapters.lora import LoraAdapter
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import LlamaSpec

Stored = tuple[GGUFTensors, Path]


class NativeDecoder:
    """The decoder stack and head over a paged pool on the CPU.

    Weights and pool are float32 or bfloat16, or weights are codes of 4 to 8 bits. Arithmetic is float32, with two
    exceptions. `avx512bf16` rounds activations, queries and attention weights to bfloat16 if the other factor is
    bfloat16. For codes, activations are rounded to 8 bits, with a scale for each 16 or 32 values of a row.

    Attributes:
        name: `native-`, the instruction set, and `-int8` if it applies.
        adapters: loaded adapters by digest.
    """

    def __init__(
        self,
        library: Library,
        model: llama.LlamaModel,
        pool: KVPool,
        threads: int,
        bits: int = 0,
        stored: Stored | None = None,
    ) -> None:
        """Pack the weights of `model` and delete the originals.

        Args:
            bits: 4 or 8 rounds the matrices to codes of that size; 0 keeps them.
            stored: a GGUF file and the model's directory. The matrices are the file's; those of `model` are [rows, 0].

        Raises:
            MemoryError: if the packed weights do not fit into memory.
        """
        self.name = f"native-{library.isa}" + (f"-int{bits}" if bits else "-gguf" if stored else "")
        self.library, self._bits = library, bits
        self.spec, self.rope, self.pool = model.spec, model.rope, pool
        self._dtype = model.embedding.dtype
        self.adapters: dict[str, PackedAdapter] = {}
        self.team = Team(library, threads)
        self._stored = StoredMatrices(self.team, self.spec, self._dtype, *stored) if stored else None
        self._weights = PackedWeights(self.team, 0 if stored else _model_bytes(library, model, bits))
        self._layers = (c.LayerStruct * self.spec.num_layers)()
        # Experts and the norm before them, by layer. The kernels compute these layers only up to the attention output.
        self._experts: dict[int, tuple[NativeExperts, torch.Tensor]] = {}
        for index in range(self.spec.num_layers):
            if (experts := model.layers[index].experts) is not None:
                norm = model.layers[index].post_norm.float()
                self._experts[index] = NativeExperts(experts, self.team, bits), norm
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

    def _pack_layer(self, layer: llama.Layer, index: int) -> c.LayerStruct:
        pack = self._weights
        k, v = self.pool.k[index], self.pool.v[index]
        if self._stored is None:
            add = partial(pack.add, bits=self._bits)
            qkv = [add(layer.qkv, layer.qkv_bias)]
            o, down = add(layer.o, layer.o_bias), add(layer.down, layer.down_bias)
            gate_up = add(layer.gate_up, layer.gate_up_bias, paired=True)
        else:
            qkv, o, gate_up, down = self._stored.layer(index)
            biases = layer.qkv_bias.split([w.n for w in qkv]) if layer.qkv_bias is not None else [None] * len(qkv)
            given = [*zip(qkv, biases, strict=True), (o, layer.o_bias), (gate_up, layer.gate_up_bias)]
            for matrix, bias in (*given, (down, layer.down_bias)):
                matrix.bias = pack.keep_bias(matrix, bias)
        return c.LayerStruct(
            input_norm=self._float(layer.input_norm),
            post_norm=self._float(layer.post_norm),
            q_norm=self._float(layer.q_norm),
            k_norm=self._float(layer.k_norm),
            o_norm=self._float(layer.o_norm),
            down_norm=self._float(layer.down_norm),
            qkv=(c.Matrix * 3)(*qkv),
            o=o,
            gate_up=gate_up,
            down=down,
            kv=c.LayerKV(k=k.data_ptr(), v=v.data_ptr(), sinks=self._float(layer.sinks)),
        )

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Pack an adapter in the model's dtype, even beside codes. Raises ModelError if it does not fit the model."""
        self.adapters[adapter.digest] = PackedAdapter(self.team, adapter, self.spec, self._dtype)

    def _float(self, weight: torch.Tensor | None) -> int | None:
        return None if weight is None else self._weights.keep(weight.float())

    def _describe_model(self, model: llama.LlamaModel) -> c.Model:
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
            gate=c.GELU if spec.gemma else c.SILU,
            shape=c.Shape(
                heads=spec.num_heads,
                kv_heads=spec.num_kv_heads,
                dim=spec.head_dim,
                page_size=pool.page_size,
                is_bf16=pool.k.dtype == torch.bfloat16,
            ),
            layers=self._layers,
            norm=self._float(model.norm),
            head=head,
            # A tied embedding is read from the packed head.
            table=head if stored is None else stored.table,
            embedding=None if is_table else self._weights.keep(model.embedding),
            embedding_is_bf16=model.embedding.dtype == torch.bfloat16,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write new K and V into the pool and return float32 logits [S, vocab] of `logits_rows`.

        The next step overwrites the logits, because allocating new memory in each step would cost too much.
        """
        return self._forward_experts(batch) if self._experts and batch.groups else self._forward(batch)

    def _forward_experts(self, batch: ForwardBatch) -> torch.Tensor:
        """One kernel call per layer; the experts run between the calls."""
        every, none = torch.arange(len(batch.tokens)), batch.logits_rows[:0]
        before, states = torch.empty(2, len(every), self.spec.hidden_size)
        entered: list[HiddenRows] = []
        for group in batch.groups:
            load = [*entered, *group.load]
            for index in group.layers:
                before, states = states, before
                part = replace(group, layers=range(index, index + 1), load=load, save=[HiddenRows(every, states)])
                self._forward(replace(batch, groups=[part], logits_rows=none))
                if index in self._experts:
                    self._add_experts(index, states, group.rows)
                load = [HiddenRows(every, states)]
            entered = load
            for wanted in group.save:
                wanted.states.copy_(states[wanted.rows])
        end = self.spec.num_layers - 1
        part = replace(batch.groups[-1], layers=range(end, end), load=entered, save=[])
        return self._forward(replace(batch, groups=[part]))

    def _add_experts(self, index: int, states: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Add the output of a layer's experts to the states, float32 [T, hidden]. `rows`: alive rows; None: all."""
        experts, norm = self._experts[index]
        x = states if rows is None else states[rows]
        x = x + experts(F.rms_norm(x, norm.shape, norm, self.spec.rms_norm_eps))
        states[slice(None) if rows is None else rows] = x

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
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
                assert one.states.dtype == torch.float32
                assert one.states.is_contiguous()
                to.rows, to.num_rows, to.states = pointer(one.rows), len(one.rows), one.states.data_ptr()
            kept.append(several)
            return several

        groups = (c.GroupStruct * len(batch.groups))()
        for to, group in zip(groups, batch.groups, strict=True):
            positions = batch.positions if group.rows is None else batch.positions[group.rows]
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
        return cosines[index], sines[index]

    def _native_plan(self, plan: AttentionPlan) -> NativePlan:
        """The plan for the kernels, from a cache of two: `AttentionPlan`s that run again only have longer spans."""
        for known in self._plans:
            if known.plan is plan:
                known.grow()
                return known
        self._plans = [*self._plans[-1:], NativePlan(plan, self.rope)]
        return self._plans[-1]

    def project(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `LlamaModel.project`."""
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
        """See `Executor.argmax`; the logits are float32."""
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


def _model_bytes(library: Library, model: llama.LlamaModel, bits: int) -> int:
    weights = []
    for layer in model.layers:
        weights += [(layer.qkv, False), (layer.o, False), (layer.gate_up, True), (layer.down, False)]
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

    def __init__(self, team: Team, adapter: LoraAdapter, spec: LlamaSpec, dtype: torch.dtype):
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


class NativePlan:
    """The spans and edges of a plan as C arrays. Their pointers are valid while this object exists.

    Attributes:
        plan: the original plan.
        spans, edges: ctypes arrays of `library.SpanStruct` and `library.EdgeStruct`.
    """

    def __init__(self, plan: AttentionPlan, rope: RotaryEmbedding):
        self._kept: list[Any] = []
        self.plan, self.num_edges = plan, len(plan.edges)
        self._pages: list[np.ndarray | None] = [None] * len(plan.spans)
        self.spans = (c.SpanStruct * len(plan.spans))()
        self.edges = (c.EdgeStruct * self.num_edges)()
        for to, span in zip(self.spans, plan.spans, strict=True):
            to.position = span.position
            if span.keep is not None:
                to.keep = self._tensor(span.keep)
            if span.shift:
                to.turn = self._tensor(torch.cat(rope.shift(torch.tensor([-span.shift]))))
        every_row = self._array(np.arange(plan.num_rows, dtype=np.int32), np.int32)
        for to, edge in zip(self.edges, plan.edges, strict=True):
            if isinstance(edge.rows, slice) and edge.rows.step in (None, 1):
                start, stop, _ = edge.rows.indices(plan.num_rows)
                to.rows, to.num_rows = every_row + 4 * start, max(stop - start, 0)
            else:
                rows = rows_of(edge, plan.num_rows)
                to.rows, to.num_rows = self._array(rows, np.int32), len(rows)
            to.span = edge.span
            if edge.visible is not None:
                to.visible = self._array(edge.visible, np.int32)
            if edge.hidden is not None:
                to.hidden = self._array(edge.hidden, np.int32)
        self.grow()

    def grow(self) -> None:
        """Update lengths and pages of the spans, after the planner has lengthened the plan."""
        for i, (to, span) in enumerate(zip(self.spans, self.plan.spans, strict=True)):
            to.length = span.length
            if span.pages is not self._pages[i]:
                self._pages[i] = pages = np.ascontiguousarray(span.pages, dtype=np.int32)
                to.pages = pages.ctypes.data

    def _array(self, array: np.ndarray, dtype: type) -> int:
        array = np.ascontiguousarray(array, dtype=dtype)
        self._kept.append(array)
        return array.ctypes.data

    def _tensor(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()
