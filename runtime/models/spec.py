"""Model specifications from config.json: shapes, switches, limits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runtime.errors import ModelError
from runtime.models.config_json import (
    Unsupported,
    architecture_of,
    is_packed,
    method_of,
    positive_size,
    read_generation,
    read_json,
    refusing,
    token_ids,
)
from runtime.models.families import (
    BIDIRECTIONAL,
    HYBRIDS,
    LATENT,
    SEEING,
    SUPPORTED,
    WITH_EXPERTS,
    family_of,
)
from runtime.models.rope_spec import RopeSpec, read_gemma_ropes, read_rope

if TYPE_CHECKING:
    from runtime.models.experts import ExpertSpec
    from runtime.models.latent import LatentSpec
    from runtime.models.recurrence import RecurrenceSpec

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
        activation: of the MLP's gate; `gelu`: with the tanh approximation.
        norms_outputs: whether norms also follow attention and MLP, as in Gemma 3.
        embedding_scale: factor on embeddings.
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
    activation: Literal["silu", "gelu"] = "silu"
    norms_outputs: bool = False
    embedding_scale: float = 1.0
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
        elsewhere = {*self.recurrent, *self.near}
        others = [i for i in range(self.num_layers) if i not in elsewhere]
        return {layer: place for layers in (others, self.near) for place, layer in enumerate(layers)}

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
        if self.norms_outputs:
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
        if self.architecture in BIDIRECTIONAL:
            from runtime.models.bidirectional import stored_name

            return stored_name(name, self.architecture)
        if self.architecture == "Lfm2ForCausalLM":
            from runtime.models.recurrence import lfm2_name

            return lfm2_name(name)
        if self.architecture in SEEING:
            from runtime.models.seeing import stored_prefix

            return stored_prefix(name, self.architecture)
        if self.architecture == "Qwen3NextForCausalLM":
            return name.replace("shared_experts.", "shared_expert.")
        if self.architecture == "DeepseekV3ForCausalLM":
            return name.replace("expert_bias", "e_score_correction_bias")
        return name


def _linear_tensors(shapes: dict[str, tuple[int, int, bool]]) -> dict[str, tuple[int, ...]]:
    """Weights, and biases where the flag is set."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in shapes.items():
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)
    return found


# What KV depends on, beside the weights.
_IN_KV = sorted(
    {one.name for one in fields(DecoderSpec)}
    - {"architecture", "model_type", "context_length", "eos_token_ids", "vocab_size", "tie_embeddings"}
    - {"fingerprint", "near"}
)


def _from_config(config: dict[str, Any], generation: dict[str, Any]) -> DecoderSpec:
    named = architecture_of(config)
    if named in SEEING:
        from runtime.models.seeing import as_decoder

        config = as_decoder(config, named)
    architecture = architecture_of(config)
    _refuse_unsupported(config, architecture)
    config, family = _translated(config, architecture), family_of(architecture)
    is_gemma, attention_bias = family == "Gemma3", bool(config.get("attention_bias", False))
    heads, hidden = positive_size(config, "num_attention_heads"), positive_size(config, "hidden_size")
    latent, recurrence = _latent(config, architecture), _recurrence(config, architecture)
    head_dim = positive_size(config, "head_dim", hidden // heads) if latent is None else latent.row
    if is_gemma:
        rope, near_rope = read_gemma_ropes(config)
    else:
        rope, near_rope = _rope(config, named, head_dim, latent), None
    experts, windows = _experts(config, architecture), _windows(config, family)
    sees, block = _sees(config, architecture)
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
        context_length=positive_size(config, "max_position_embeddings") // block * block,
        eos_token_ids=token_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        rope=rope,
        fingerprint="",
        windows=windows,
        fused_qkv=architecture == "LLaDA2MoeModelLM",
        experts=experts,
        sees=sees,
        centered=is_gemma or family in _QWEN_HYBRIDS,
        activation="gelu" if is_gemma else "silu",
        norms_outputs=is_gemma,
        embedding_scale=hidden**0.5 if is_gemma else 1.0,
        near_rope=near_rope,
        query_scale=(head_dim / config.get("query_pre_attn_scalar", 256)) ** 0.5 if is_gemma else 1.0,
        sinks=family == "GptOss",
        recurrence=recurrence,
        states=() if recurrence is None else recurrence.states * len(recurrence.layers),
        gated=family in _QWEN_HYBRIDS,
        latent=latent,
        halves=1 if latent else 2,
    )
    _check_shape(spec)
    return replace(spec, fingerprint=repr([getattr(spec, name) for name in _IN_KV]))


def _translated(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """A configuration with the keys of Llama's family."""
    if architecture in BIDIRECTIONAL:
        from runtime.models.bidirectional import as_causal

        return as_causal(config, architecture)
    if architecture in HYBRIDS:
        from runtime.models.recurrence import as_hybrid

        return as_hybrid(config, architecture)
    return {**_GPT_OSS, **config} if architecture == "GptOssForCausalLM" else config


def _rope(config: dict[str, Any], named: str, head_dim: int, latent: LatentSpec | None) -> RopeSpec:
    """`named`: the model's architecture, of which the configuration may be the decoder's."""
    decoder = architecture_of(config)
    is_partial = decoder == "LLaDA2MoeModelLM" or family_of(decoder) in _QWEN_HYBRIDS
    rope = read_rope(config, head_dim if is_partial else None)
    rope = rope if latent is None else replace(rope, rotated=latent.rotated)
    if named not in SEEING:
        return rope
    from runtime.models.seeing import rope_axes

    return replace(rope, axes=rope_axes(config, named, (rope.rotated or head_dim) // 2))


def _latent(config: dict[str, Any], architecture: str) -> LatentSpec | None:
    if architecture not in LATENT:
        return None
    from runtime.models.latent import latent_spec

    return latent_spec(config, architecture)


def _recurrence(config: dict[str, Any], architecture: str) -> RecurrenceSpec | None:
    if architecture not in HYBRIDS:
        return None
    from runtime.models.recurrence import recurrence_spec

    return recurrence_spec(config, HYBRIDS[architecture])


def _experts(config: dict[str, Any], architecture: str) -> ExpertSpec | None:
    if architecture not in WITH_EXPERTS:
        return None
    from runtime.models.experts import expert_spec

    return expert_spec(config, architecture)


def _sees(config: dict[str, Any], architecture: str) -> tuple[str, int]:
    """`ModelSpec.sees`, and the size of the blocks."""
    if architecture not in BIDIRECTIONAL:
        return "causal", 1
    from runtime.models.bidirectional import block_size

    block = block_size(config, architecture)
    return ("all", 1) if block is None else (f"blocks of {block}", block)


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
    if method_of(config) is not None and not is_packed(config):
        from runtime.models.quantization import read_quantization

        read_quantization(config)


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
