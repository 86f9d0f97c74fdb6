"""Model specifications from config.json: shapes, switches, limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.models.bidirectional import BIDIRECTIONAL, as_causal, block_size, llada2_name, llada_name
from runtime.models.config_json import (
    Unsupported,
    architecture_of,
    positive_size,
    read_generation,
    read_json,
    refusing,
    token_ids,
)
from runtime.models.experts import ExpertSpec, expert_spec
from runtime.models.latent import LATENT, LatentSpec, latent_spec
from runtime.models.quantization import method_of, read_quantization
from runtime.models.recurrence import (
    HYBRIDS,
    RecurrenceSpec,
    as_hybrid,
    kv_places,
    lfm2_name,
    recurrence_spec,
    state_shapes,
)
from runtime.models.rope_spec import RopeSpec, read_gemma_ropes, read_rope
from runtime.models.seeing import SEEING, as_decoder, rope_axes, stored_prefix

_CAUSAL = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma3", "GptOss")
SUPPORTED = (*(f"{family}ForCausalLM" for family in _CAUSAL), *LATENT, *HYBRIDS, *BIDIRECTIONAL, *SEEING)
# Families whose configurations have `attention_bias`.
_ATTENTION_BIAS = ("Llama", "Qwen3", "Gemma3", "GptOss", "Qwen3_5", "Qwen3Next")
_QWEN_HYBRIDS = ("Qwen3_5", "Qwen3Next")
# Published values of gpt-oss' optional fields.
_GPT_OSS = {
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shapes and limits of a decoder.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_dim: the largest values of all layers, also the pool's shape.
        halves: 2, keys and values, or 1 if the pool's rows are both at once.
        fingerprint: properties other than the weights that affect KV.
        sees: which rows a row sees: `causal`, itself and those before; `blocks of N`, also those up to the end of its
            block; `all`.
        states: shapes of the float32 tensors that recurrent layers keep of a sequence; empty: no such layers.
        num_stateful: number of these layers.
    """

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    halves: int = 2
    sees: str = "causal"
    states: tuple[tuple[int, ...], ...] = ()
    num_stateful: int = 0

    @property
    def causal(self) -> bool:
        """Whether no row sees a later one."""
        return self.sees == "causal"

    @property
    def kv_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.num_layers

    @property
    def records(self) -> tuple[int, ...]:
        """For each recurrent layer, the floats of a token from which the state can be computed again."""
        return (self.hidden_size,) * self.num_stateful

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the model to which a measured table belongs. Models with equal values may share a table."""
        names = ("model_type", "num_layers", "hidden_size", "vocab_size")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """A decoder of the Llama family, which Ramet's own code computes.

    Attributes:
        windows: for each layer, how many positions a row sees, its own included; None: all. Empty: no windows.
        fused_qkv: whether the checkpoint has q, k and v in one tensor.
        experts: experts that replace the MLP in some layers.
        centered: whether norms multiply by 1 + weight.
        gemma: whether layers follow Gemma 3: norms also follow attention and MLP, embeddings are scaled, and the gate
            is a GELU.
        near_rope: rotary embedding of layers with a window; None: the same as `rope`.
        query_scale: factor on queries, in addition to head_dim ** -0.5.
        sinks: whether each head has an attention sink, as in gpt-oss.
        recurrence: recurrent layers, which have no attention.
        gated: whether the sigmoid of a second projection, beside each head's queries, multiplies the attention.
        latent: latent attention; `head_dim` is the size of its rows.
        near: layers with a window whose KV is in a pool of their own, chosen by the executor.
    """

    intermediate_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec
    windows: tuple[int | None, ...] = ()
    fused_qkv: bool = False
    experts: ExpertSpec | None = None
    centered: bool = False
    gemma: bool = False
    near_rope: RopeSpec | None = None
    query_scale: float = 1.0
    sinks: bool = False
    recurrence: RecurrenceSpec | None = None
    gated: bool = False
    latent: LatentSpec | None = None
    near: tuple[int, ...] = ()

    @property
    def kv_layers(self) -> int:
        return self.num_layers - len(self.recurrent) - len(self.near)

    @property
    def largest_window(self) -> int:
        """Number of positions that a row sees at most in the layers `near`."""
        return max((size for i in self.near if (size := self.windows[i]) is not None), default=0)

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Indices of the recurrent layers."""
        return () if self.recurrence is None else self.recurrence.layers

    @property
    def kv_places(self) -> dict[int, int]:
        """The layer of the KV pool for each layer with attention."""
        others = kv_places(self.num_layers, (*self.recurrent, *self.near))
        return others | {layer: place for place, layer in enumerate(self.near)}

    @property
    def records(self) -> tuple[int, ...]:
        return () if self.recurrence is None else (self.recurrence.record,) * len(self.recurrent)

    @property
    def needs_torch(self) -> bool:
        """Whether FlashInfer cannot compute this model.

        FlashInfer's operations need norms in half precision and one rotary embedding, and do not support sinks or rows
        of latent attention.
        """
        return self.centered or self.sinks or bool(self.recurrent) or self.latent is not None

    @property
    def unpacked(self) -> DecoderSpec:
        """The spec of this model after its packed experts have been unpacked to floats."""
        return self if self.experts is None else replace(self, experts=replace(self.experts, packed=False))

    @classmethod
    def load(cls, directory: Path) -> DecoderSpec:
        """Read `config.json` (and the end-of-sequence ids of `generation_config.json`).

        Raises:
            ModelError: if a file is missing or invalid, or the model is unsupported.
        """
        config = read_json(directory / "config.json")
        with refusing(directory / "config.json"):
            return _from_config(config, read_generation(directory))

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors in a checkpoint."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        attention, mlp = self._attention_tensors(), self._mlp_tensors()
        for i in range(self.num_layers):
            mixer = self.recurrence.tensors(hidden) if self.recurrence and i in self.recurrent else attention
            inner = self.experts.tensors(hidden) if self.experts and i in self.experts.layers else mlp
            layer = mixer | inner | {f"{name}.weight": (hidden,) for name in norms}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def _attention_tensors(self) -> dict[str, tuple[int, ...]]:
        if self.latent is not None:
            return self.latent.tensors(self.hidden_size, self.num_heads)
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        separate = {"q": q * (2 if self.gated else 1), "k": kv, "v": kv}
        fused = {"qkv": q + 2 * kv} if self.fused_qkv else separate
        linear = {f"self_attn.{name}_proj": (rows, hidden, self.qkv_bias) for name, rows in fused.items()}
        linear["self_attn.o_proj"] = (hidden, q, self.o_bias)
        shapes = _linear_tensors(linear)
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        if self.sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        return shapes

    def _mlp_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, bias = self.hidden_size, self.intermediate_size, self.mlp_bias
        shapes = {"gate": (inner, hidden, bias), "up": (inner, hidden, bias), "down": (hidden, inner, bias)}
        return _linear_tensors({f"mlp.{name}_proj": shape for name, shape in shapes.items()})

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint of one of the `expected_tensors`."""
        if self.architecture == "LLaDA2MoeModelLM":
            return llada2_name(name)
        if self.architecture == "Lfm2ForCausalLM":
            return lfm2_name(name)
        if self.architecture in SEEING:
            return stored_prefix(name, self.architecture)
        if self.architecture == "Qwen3NextForCausalLM":
            return name.replace("shared_experts.", "shared_expert.")
        if self.architecture == "DeepseekV3ForCausalLM":
            return name.replace("expert_bias", "e_score_correction_bias")
        return llada_name(name) if self.model_type == "llada" else name


def _linear_tensors(shapes: dict[str, tuple[int, int, bool]]) -> dict[str, tuple[int, ...]]:
    """Weights, and biases where the flag is set."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in shapes.items():
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)
    return found


def _from_config(config: dict[str, Any], generation: dict[str, Any]) -> DecoderSpec:
    named = architecture_of(config)
    config = as_decoder(config, named)
    architecture = architecture_of(config)
    _refuse_unsupported(config, architecture)
    config, family = _translated(config, architecture)
    is_llada2 = architecture == "LLaDA2MoeModelLM"
    is_gemma, is_gpt_oss, query_scale = family == "Gemma3", family == "GptOss", 1.0
    attention_bias = bool(config.get("attention_bias", False))
    block = block_size(config, architecture)
    heads, hidden = positive_size(config, "num_attention_heads"), positive_size(config, "hidden_size")
    latent, recurrence = latent_spec(config, architecture), recurrence_spec(config, family)
    head_dim = positive_size(config, "head_dim", hidden // heads) if latent is None else latent.row
    if is_gemma:
        rope, near_rope = read_gemma_ropes(config)
        query_scale = (head_dim / config.get("query_pre_attn_scalar", 256)) ** 0.5
    else:
        rope, near_rope = read_rope(config, head_dim if is_llada2 or family in _QWEN_HYBRIDS else None), None
        rope = rope if latent is None else replace(rope, rotated=latent.rotated)
        rope = replace(rope, axes=rope_axes(config, named, (rope.rotated or head_dim) // 2))
    experts, windows = expert_spec(config, architecture), _windows(config, family)
    others = [one for one in (experts, near_rope, windows, recurrence, latent, rope.axes) if one]
    spec = DecoderSpec(
        architecture=named,
        model_type=config.get("model_type") or "",
        hidden_size=hidden,
        num_layers=positive_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=1 if latent else positive_size(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=positive_size(config, "intermediate_size"),
        vocab_size=positive_size(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", is_gemma)),
        qkv_bias=family == "Qwen2" or (family in _ATTENTION_BIAS and attention_bias),
        o_bias=family in _ATTENTION_BIAS and attention_bias,
        mlp_bias=family == "Llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family in ("Qwen3", "Gemma3", "Lfm2", *_QWEN_HYBRIDS),
        context_length=positive_size(config, "max_position_embeddings") // (block or 1) * (block or 1),
        eos_token_ids=token_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        rope=rope,
        fingerprint=repr((rope, *others)) if others else repr(rope),
        windows=windows,
        fused_qkv=is_llada2,
        experts=experts,
        sees=_sees(architecture, block),
        centered=is_gemma or family in _QWEN_HYBRIDS,
        gemma=is_gemma,
        near_rope=near_rope,
        query_scale=query_scale,
        sinks=is_gpt_oss,
        recurrence=recurrence,
        states=state_shapes(recurrence),
        gated=family in _QWEN_HYBRIDS,
        latent=latent,
        halves=1 if latent else 2,
    )
    _check_shape(spec)
    return spec


def _translated(config: dict[str, Any], architecture: str) -> tuple[dict[str, Any], str]:
    """A configuration with the keys of Llama's family, and the name of its family."""
    if architecture in BIDIRECTIONAL:
        config = as_causal(config, architecture)
    elif architecture in HYBRIDS:
        config = as_hybrid(config, architecture)
    elif architecture == "GptOssForCausalLM":
        config = {**_GPT_OSS, **config}
    family = BIDIRECTIONAL.get(architecture) or HYBRIDS.get(architecture)
    return config, family or architecture.removesuffix("ForCausalLM").removesuffix("Moe")


def _sees(architecture: str, block: int | None) -> str:
    """See `ModelSpec`."""
    if architecture not in BIDIRECTIONAL:
        return "causal"
    return "all" if block is None else f"blocks of {block}"


def _check_shape(spec: DecoderSpec) -> None:
    if spec.windows and spec.rope.axes:
        raise ModelError(
            "the model has a sliding window; supported are models with positions in three axes without one"
        )
    if spec.windows and not spec.causal:
        raise ModelError("the model has a sliding window; supported are bidirectional models without one")
    if spec.gated and spec.qkv_bias:
        raise ModelError("the model has attention_bias; supported are models with gates of attention without it")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"the model has {spec.num_heads} query heads, not a multiple of its {spec.num_kv_heads} key-value heads"
        )
    if spec.head_dim % 2:
        raise ModelError(f"the model's head_dim is {spec.head_dim}; the rotary embedding needs an even one")


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    if architecture not in SUPPORTED:
        raise Unsupported(f"the model's architecture is {architecture}; supported are {', '.join(SUPPORTED)}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise Unsupported(f"the model's activation is {activation!r}; supported is 'silu'")
    if (activation := config.get("hidden_activation")) not in (None, "gelu_pytorch_tanh"):
        raise Unsupported(f"the model's activation is {activation!r}; supported is 'gelu_pytorch_tanh'")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if architecture == "Gemma3ForCausalLM" and config.get(name):
            raise Unsupported(f"config.json has {name} {config[name]!r}; supported are models without it")
    if not is_packed(config):
        read_quantization(config)


def is_packed(config: dict[str, Any]) -> bool:
    """Whether this is gpt-oss with experts in MXFP4."""
    return (config.get("architectures"), method_of(config)) == (["GptOssForCausalLM"], "mxfp4")


def _windows(config: dict[str, Any], family: str) -> tuple[int | None, ...]:
    """The sliding window of each layer. A missing field means the published default; null means no window."""
    active = family in ("Mistral", "Gemma3", "GptOss") or (
        family != "Llama" and bool(config.get("use_sliding_window", False))
    )
    if not active or config.get("sliding_window", 4096) is None:
        return ()
    window, layers = positive_size(config, "sliding_window", 4096), range(positive_size(config, "num_hidden_layers"))
    if family == "Mistral" or config.get("model_type") == "qwen3_moe":
        return tuple(window for _ in layers)
    if family == "Gemma3":
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        near = [bool((i + 1) % every) for i in layers]
    elif family == "GptOss":
        near = [i % 2 == 0 for i in layers]
    else:
        near = [i >= config.get("max_window_layers", 28) for i in layers]
    types = config.get("layer_types") or ["sliding_attention" if one else "full_attention" for one in near]
    if len(types) < len(layers) or set(types) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"config.json has layer_types {types}; each layer needs sliding_attention or full_attention")
    windows = tuple(window if types[i] == "sliding_attention" else None for i in layers)
    return windows if any(windows) else ()
