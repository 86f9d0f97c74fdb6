"""The torch decoder of the Llama family, with layers of attention and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from runtime.batch import AdapterRows, ForwardBatch, LayerGroup, StateRows
from runtime.execution.adapters import Adapted, FusedAdapter, add, fuse, rows_within
from runtime.execution.attention.backend import AttentionBackend
from runtime.execution.mixers.attention import Attention
from runtime.execution.mixers.mixer import Attend, KVMixer, LayerWeights, MixedRows, Mixer
from runtime.execution.ops import Ops
from runtime.execution.transfers import upload
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding, pairs_in_halves
from runtime.models.spec import DecoderSpec

if TYPE_CHECKING:
    from runtime.execution.attention.torch_attention import TorchAttention
    from runtime.execution.experts import Experts
    from runtime.kv.states import StatePool
    from runtime.models.adapters.lora import LoraAdapter
    from runtime.models.experts import ExpertSpec


@dataclass(slots=True)
class Layer:
    """One decoder layer. Gate and up are fused, because they read the same input.

    `o` multiplies what the mixer returns. `o_norm` and `down_norm` normalise the outputs of o and down before the
    residual is added; `post_norm` the input of the MLP. With `experts`, gate, up and down belong to the shared expert,
    and are empty if there is none. `shared_gate` [1, hidden]: its sigmoid multiplies what the shared expert gives.
    """

    input_norm: torch.Tensor
    mixer: Mixer
    o: torch.Tensor
    o_bias: torch.Tensor | None
    o_norm: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    down_norm: torch.Tensor | None
    experts: Experts | None
    shared_gate: torch.Tensor | None


class TorchDecoder:
    """The decoder stack and head over a paged pool, by torch. On a CPU, `NativeDecoder` packs the weights and computes.

    Attributes:
        adapters: loaded adapters by digest.
        near_rope: rotary embedding of layers with a window.
        embedding_scale: factor on embeddings, rounded to the dtype of the weights.
        states: the pool of recurrent states, which the executor sets; None: there are no recurrent layers.
        is_chunked: whether recurrent layers compute all sequences of a step together, see `StatePlan`.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: dict[str, torch.Tensor],
        device: torch.device,
        ops: Ops | None = None,
        keeps_codes: bool = False,
    ):
        """Move the weights to `device`.

        Args:
            spec: the model, or this rank's shard of it.
            weights: the result of `load_weights`. The dictionary is emptied, so that no copy stays in memory.
            device: where the weights go.
            ops: norms, rotation and products, with sums over the ranks.
            keeps_codes: whether experts in MXFP4 stay packed, for the kernels.
        """
        self.spec = spec
        self.keeps_codes = keeps_codes
        self.ops = ops or Ops()
        self.states: StatePool | None = None
        self.is_chunked = device.type != "cpu"
        if spec.centered:
            _finish_norms(weights, spec)
        self.embedding = weights.pop("model.embed_tokens.weight").to(device)
        head = weights.pop("lm_head.weight", None)
        self.head = self.embedding if head is None else head.to(device)
        self.norm = weights.pop("model.norm.weight").to(device)
        self.rope = RotaryEmbedding(spec.rope, spec.head_dim, device)
        self.near_rope = RotaryEmbedding(spec.near_rope or spec.rope, spec.head_dim, device)
        scale = torch.tensor(spec.embedding_scale, dtype=self.embedding.dtype)
        self.embedding_scale = float(scale)
        if spec.rope.rotated and spec.latent is None:
            _order_pairs(weights, spec)
        self.layers = [_take_layer(weights, i, self) for i in range(spec.num_layers)]
        self.adapters: dict[str, FusedAdapter] = {}

    def sinks(self, near: bool = False) -> list[torch.Tensor | None]:
        """The attention sinks of each layer of the pool, or with `near` of the pool of `spec.near`."""
        layers = (layer.mixer for i, layer in enumerate(self.layers) if (i in self.spec.near) == near)
        return [mixer.sinks for mixer in layers if isinstance(mixer, Attention)]

    @property
    def most_free_rows(self) -> float:
        """See `Experts`; without experts, there is no limit."""
        return min(
            (layer.experts.most_free_rows for layer in self.layers if layer.experts is not None), default=math.inf
        )

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load an adapter. Raises ModelError if it does not fit the model."""
        dtype, device = self.embedding.dtype, self.embedding.device
        self.adapters[adapter.digest] = [
            {product: one.to(dtype, device) for product, one in layer.items()} for layer in fuse(adapter, self.spec)
        ]

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: KVPool, backend: AttentionBackend, near: TorchAttention | None = None
    ) -> torch.Tensor:
        """Run one step: write new K and V into `pool` and return float32 logits [S, vocab] of `logits_rows`.

        `near`: attention of the layers `spec.near`, over their pool.
        """
        prepared = backend.prepare_step([group.attention for group in batch.groups])
        hidden = F.embedding(self._upload(batch.tokens), self.embedding)
        if self.embedding_scale != 1:
            hidden *= self.embedding_scale
        positions = self._upload(batch.positions if batch.axes is None else batch.axes)
        logits_rows = self._upload(batch.logits_rows)
        for group, plan in zip(batch.groups, prepared, strict=True):
            for given in group.load:
                rows, states = self._upload(given.rows), given.states.to(hidden.device, hidden.dtype)
                hidden[rows] = hidden[rows] + states if given.adds else states
            at = (near.pool, near) if near is not None and group.layers.start in self.spec.near else (pool, backend)
            attend = Attend(*at, plan, *self._written(group))
            adapted = self._adapted(rows_within(batch.adapters, group.rows))
            if group.rows is None:
                hidden = self.run_layers(group.layers, hidden, positions, attend, adapted, batch.states)
            else:
                rows = self._upload(group.rows)
                alive = self.run_layers(group.layers, hidden[rows], positions[rows], attend, adapted)
                hidden = hidden.index_copy(0, rows, alive)
            for wanted in group.save:
                wanted.states.copy_(hidden[self._upload(wanted.rows)])
        if not len(logits_rows):
            return hidden.new_empty(0, self.spec.vocab_size, dtype=torch.float32)
        return self.logits(hidden[logits_rows])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [S, vocab] of the last layer's output [S, hidden]."""
        hidden = self.ops.rms_norm(hidden, self.norm, self.spec.rms_norm_eps)
        return self.ops.logits(hidden, self.head, self.spec.vocab_size)

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor, self.embedding.device)

    def _written(self, group: LayerGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`Attend.slots` and `Attend.written` of a group."""
        if bool((group.kv_write >= 0).all()):
            return self._upload(group.kv_write), None
        rows = (group.kv_write >= 0).nonzero()[:, 0]
        return self._upload(group.kv_write[rows]), self._upload(rows)

    def _adapted(self, rows: Sequence[AdapterRows]) -> list[Adapted]:
        return [Adapted(self.adapters[one.digest], one.first, one.stop) for one in rows]

    def run_layers(
        self,
        layers: range,
        x: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        adapted: Sequence[Adapted] = (),
        states: Sequence[StateRows] = (),
    ) -> torch.Tensor:
        """Hidden states [T', hidden] after `layers`.

        Args:
            layers: consecutive layers with the same rotary embedding.
            x: [T', hidden], the states before these layers; may be overwritten.
            positions: int64 [T'], or [T', 3] as `ForwardBatch.axes`.
            attend: attention of the layer group.
            adapted: the rows with an adapter.
            states: the rows of each sequence, for recurrent layers.
        """
        eps, ops = self.spec.rms_norm_eps, self.ops
        activate = ops.gelu_and_mul if self.spec.activation == "gelu" else ops.silu_and_mul
        is_near = bool(self.spec.windows) and self.spec.windows[layers.start] is not None
        angles = ops.angles(self.near_rope if is_near else self.rope, positions)
        rows = MixedRows(attend, angles, adapted, states, self.states, self.is_chunked)
        normed = ops.rms_norm(x, self.layers[layers.start].input_norm, eps)
        for index in layers:
            layer = self.layers[index]
            mixed = layer.mixer.mix(normed, rows)
            if layer.o_norm is None:
                add(adapted, index, "o", x, mixed)
                x, normed = ops.add_linear_norm(x, mixed, layer.o, layer.o_bias, layer.post_norm, eps)
            else:
                out = F.linear(mixed, layer.o, layer.o_bias)
                add(adapted, index, "o", out, mixed)
                x = x + ops.rms_norm(out, layer.o_norm, eps)
                normed = ops.rms_norm(x, layer.post_norm, eps)
            if layer.experts is not None:
                x = x + layer.experts(normed)
            gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
            add(adapted, index, "gate_up", gate_up, normed)
            is_last = index + 1 == layers.stop
            following = layer.input_norm if is_last else self.layers[index + 1].input_norm
            inner = activate(gate_up)
            if layer.shared_gate is not None:
                inner *= F.linear(normed, layer.shared_gate).sigmoid()
            if layer.down_norm is None:
                add(adapted, index, "down", x, inner)
                if is_last:
                    return ops.add_linear(x, inner, layer.down, layer.down_bias)
                x, normed = ops.add_linear_norm(x, inner, layer.down, layer.down_bias, following, eps)
            else:
                out = F.linear(inner, layer.down, layer.down_bias)
                add(adapted, index, "down", out, inner)
                x = x + ops.rms_norm(out, layer.down_norm, eps)
                normed = ops.rms_norm(x, following, eps)
        return x

    @torch.inference_mode()
    def project(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated queries, rotated keys and values of a layer, float32 [n, heads + 2 kv_heads, head_dim].

        `states`: float32 [n, hidden], the input of the layer; `positions`: int64 [n].
        """
        weights, device = self.layers[layer], self.embedding.device
        assert isinstance(weights.mixer, KVMixer)
        normed = self.ops.rms_norm(states.to(device, self.embedding.dtype), weights.input_norm, self.spec.rms_norm_eps)
        return weights.mixer.project(normed, self.ops.angles(self.rope, self._upload(positions)))


def _finish_norms(weights: dict[str, torch.Tensor], spec: DecoderSpec) -> None:
    """Replace Gemma's norm weights w by the factors 1 + w; include the scale of queries in `q_norm`."""
    for name, weight in weights.items():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            scale = spec.query_scale if name.endswith("q_norm.weight") else 1.0
            weights[name] = (1 + weight.float()) * scale


def _order_pairs(weights: dict[str, torch.Tensor], spec: DecoderSpec) -> None:
    """Reorder the head dimensions of partially rotated queries and keys; see `pairs_in_halves`."""
    order, turned = pairs_in_halves(spec.rope, spec.head_dim), spec.num_heads + spec.num_kv_heads
    for name, weight in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = weight[order]
        elif name.endswith(("qkv_proj.weight", "q_proj.weight", "k_proj.weight")):
            # [heads, parts of a head, head_dim, hidden]; a head's queries and their gate are parts.
            parts = weight.unflatten(0, (-1, 2 if spec.gated and ".q_proj" in name else 1, spec.head_dim))
            qk = parts[:turned, 0]
            qk.copy_(qk[:, order])


def _take_layer(weights: dict[str, torch.Tensor], index: int, model: TorchDecoder) -> Layer:
    spec, prefix = model.spec, f"model.layers.{index}."
    taken = LayerWeights(weights, prefix, model.embedding.device)
    mlp, experts = "mlp.", None
    if spec.experts is not None and index in spec.experts.layers:
        experts, mlp = _take_experts(weights, prefix, spec.experts, model), "mlp.shared_experts."
    mixer, output = _take_mixer(taken, spec, model.ops, index)
    before_mlp, behind_attention = "post_attention_layernorm.weight", None
    if spec.norms_outputs:
        before_mlp, behind_attention = "pre_feedforward_layernorm.weight", taken.one(before_mlp)
    return Layer(
        input_norm=taken.must("input_layernorm.weight"),
        mixer=mixer,
        o=taken.must(f"{output}.weight"),
        o_bias=taken.one(f"{output}.bias"),
        o_norm=behind_attention,
        post_norm=taken.must(before_mlp),
        gate_up=taken.fused(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        gate_up_bias=taken.fused_bias(mlp + "gate_proj.bias", mlp + "up_proj.bias"),
        down=taken.must(mlp + "down_proj.weight"),
        down_bias=taken.one(mlp + "down_proj.bias"),
        down_norm=taken.one("post_feedforward_layernorm.weight"),
        experts=experts,
        shared_gate=taken.one("mlp.shared_expert_gate.weight"),
    )


def _take_mixer(taken: LayerWeights, spec: DecoderSpec, ops: Ops, index: int) -> tuple[Mixer, str]:
    """A layer's mixer, and the module of the product of what it returns."""
    recurrence = spec.recurrence
    if spec.latent is not None:
        from runtime.execution.mixers.latent import LatentAttention

        return LatentAttention.take(taken, spec.latent, ops, index, spec.num_heads), "self_attn.o_proj"
    if recurrence is None or index not in recurrence.layers:
        return Attention.take(taken, spec, ops, index, spec.kv_places[index]), "self_attn.o_proj"
    from runtime.execution.mixers.delta_net import DeltaNet
    from runtime.execution.mixers.short_conv import ShortConv
    from runtime.models.recurrence import ConvSpec

    order = recurrence.layers.index(index)
    if isinstance(recurrence, ConvSpec):
        return ShortConv(recurrence, taken, order), recurrence.output
    return DeltaNet(recurrence, taken, order, spec.rms_norm_eps), recurrence.output


def _take_experts(weights: dict[str, torch.Tensor], prefix: str, spec: ExpertSpec, model: TorchDecoder) -> Experts:
    """Take a layer's experts out of `weights`. Without a shared expert, add empty weights for it."""
    from runtime.execution.experts import Experts, take_fused

    device, mlp = model.embedding.device, f"{prefix}mlp."

    def stacked(kind: str, *names: str) -> torch.Tensor:
        experts = range(spec.count)
        every = [[weights.pop(f"{mlp}experts.{i}.{name}_proj.{kind}") for name in names] for i in experts]
        return torch.stack([torch.cat(one) for one in every]).to(device)

    if not spec.shared:
        hidden = model.spec.hidden_size
        for name, shape in (("gate", (0, hidden)), ("up", (0, hidden)), ("down", (hidden, 0))):
            weights[f"{mlp}shared_experts.{name}_proj.weight"] = model.embedding.new_empty(shape)
    if spec.fused:
        return take_fused(weights, mlp, spec, model.embedding, model.ops, model.keeps_codes)
    bias = weights.pop(f"{mlp}gate.expert_bias", None)
    router = weights.pop(f"{mlp}gate.weight").to(device)
    bias = None if bias is None else bias.float().to(device)
    found = Experts(spec, model.ops, router.float(), stacked("weight", "gate", "up"), stacked("weight", "down"), bias)
    if spec.limit is not None:
        found.router_bias = weights.pop(f"{mlp}gate.bias").float().to(device)
        found.gate_up_bias, found.down_bias = stacked("bias", "gate", "up"), stacked("bias", "down")
    return found
