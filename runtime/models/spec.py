"""Model specifications from config.json: shapes, switches, limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.models.config_json import (
    Unsupported,
    positive_size,
    read_generation,
    read_json,
    refuse_quantised,
    token_ids,
)
from runtime.models.diffusion import (
    FAMILIES,
    DiffusionSpec,
    as_llama,
    as_qwen3,
    diffusion_spec,
    llada2_name,
    llada_name,
)
from runtime.models.experts import ExpertSpec, expert_spec
from runtime.models.rope_spec import RopeSpec, read_gemma_ropes, read_rope

_CAUSAL = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma3", "GptOss")
SUPPORTED = (*(f"{family}ForCausalLM" for family in _CAUSAL), *FAMILIES)
# Families whose configurations have `attention_bias`.
_ATTENTION_BIAS = ("Llama", "Qwen3", "Gemma3", "GptOss")
# Published values of gpt-oss' optional fields.
_GPT_OSS = {
    **{"rope_theta": 150000.0, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5},
    "rope_scaling": {"type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shapes and limits of a decoder.

    Attributes:
        num_layers, num_heads, num_kv_heads, head_dim: the largest values of all layers, also the pool's shape.
        fingerprint: properties other than the weights that affect KV.
        diffusion: set for diffusion models; None: the model is causal.
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
    diffusion: DiffusionSpec | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the model to which a measured table belongs. Models with equal values may share a table."""
        names = ("model_type", "num_layers", "hidden_size", "vocab_size")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(ModelSpec):
    """A decoder of the Llama family, which Ramet's own code computes.

    Attributes:
        windows: for each layer, how many positions a row sees, its own included; None: all. Empty: no windows.
        fused_qkv: whether the checkpoint has q, k and v in one tensor.
        experts: experts that replace the MLP in some layers.
        gemma: whether layers follow Gemma 3: norms multiply by 1 + weight and also follow attention and MLP, embeddings
            are scaled, and the gate is a GELU.
        near_rope: rotary embedding of layers with a window; None: the same as `rope`.
        query_scale: factor on queries, in addition to head_dim ** -0.5.
        sinks: whether each head has an attention sink, as in gpt-oss.
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
    gemma: bool = False
    near_rope: RopeSpec | None = None
    query_scale: float = 1.0
    sinks: bool = False

    @property
    def needs_torch(self) -> bool:
        """Whether FlashInfer cannot compute this model.

        FlashInfer's operations need norms in half precision and one rotary embedding, and do not support sinks.
        """
        return self.gemma or self.sinks

    @property
    def unpacked(self) -> LlamaSpec:
        """The spec of this model after its packed experts have been unpacked to floats."""
        return self if self.experts is None else replace(self, experts=replace(self.experts, packed=False))

    @classmethod
    def load(cls, directory: Path) -> LlamaSpec:
        """Read `config.json` (and the end-of-sequence ids of `generation_config.json`).

        Raises:
            ModelError: if a file is missing or invalid, or the model is unsupported.
        """
        config = read_json(directory / "config.json")
        try:
            return _from_config(config, read_generation(directory))
        except KeyError as error:
            raise ModelError(f"{directory / 'config.json'} has no {error.args[0]!r}") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"{directory / 'config.json'} has a value of the wrong kind: {error}") from None

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors in a checkpoint."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        separate = {"q": q, "k": kv, "v": kv}
        fused = {"qkv": q + 2 * kv} if self.fused_qkv else separate
        linear = {f"self_attn.{name}_proj": (rows, hidden, self.qkv_bias) for name, rows in fused.items()}
        linear["self_attn.o_proj"] = (hidden, q, self.o_bias)
        mlp = {
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.gemma:
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            prefix = f"model.layers.{i}."
            experts = self.experts if self.experts and i in self.experts.layers else None
            for name, (rows, columns, bias) in (linear if experts else linear | mlp).items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
            if self.sinks:
                shapes[f"{prefix}self_attn.sinks"] = (self.num_heads,)
            if experts is not None:
                shapes |= {prefix + name: shape for name, shape in experts.tensors(hidden).items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint of one of the `expected_tensors`."""
        if self.architecture == "LLaDA2MoeModelLM":
            return llada2_name(name)
        return llada_name(name) if self.model_type == "llada" else name


def _from_config(config: dict[str, Any], generation: dict[str, Any]) -> LlamaSpec:
    architecture = (config.get("architectures") or ["(none named)"])[0]
    _refuse_unsupported(config, architecture)
    if architecture == "LLaDAModelLM":
        config = as_llama(config)
    is_llada2 = architecture == "LLaDA2MoeModelLM"
    if is_llada2:
        config = as_qwen3(config)
    family = FAMILIES.get(architecture) or architecture.removesuffix("ForCausalLM").removesuffix("Moe")
    is_gemma, is_gpt_oss, query_scale = family == "Gemma3", family == "GptOss", 1.0
    if is_gpt_oss:
        config = {**_GPT_OSS, **config}
    attention_bias = bool(config.get("attention_bias", False))
    diffusion = diffusion_spec(config, architecture)
    attended = diffusion.attended or 1 if diffusion else 1
    heads, hidden = positive_size(config, "num_attention_heads"), positive_size(config, "hidden_size")
    head_dim = positive_size(config, "head_dim", hidden // heads)
    if is_gemma:
        rope, near_rope = read_gemma_ropes(config)
        query_scale = (head_dim / config.get("query_pre_attn_scalar", 256)) ** 0.5
    else:
        rope, near_rope = read_rope(config, head_dim if is_llada2 else None), None
    experts, windows = expert_spec(config, architecture), _windows(config, family)
    others = [one for one in (experts, near_rope, windows) if one]
    spec = LlamaSpec(
        architecture=architecture,
        model_type=config.get("model_type") or "",
        hidden_size=hidden,
        num_layers=positive_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=positive_size(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=positive_size(config, "intermediate_size"),
        vocab_size=positive_size(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", is_gemma)),
        qkv_bias=family == "Qwen2" or (family in _ATTENTION_BIAS and attention_bias),
        o_bias=family in _ATTENTION_BIAS and attention_bias,
        mlp_bias=family == "Llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family in ("Qwen3", "Gemma3"),
        context_length=positive_size(config, "max_position_embeddings") // attended * attended,
        eos_token_ids=token_ids(config.get("eos_token_id"), generation.get("eos_token_id")),
        rope=rope,
        fingerprint=repr((rope, *others)) if others else repr(rope),
        windows=windows,
        fused_qkv=is_llada2,
        experts=experts,
        diffusion=diffusion,
        gemma=is_gemma,
        near_rope=near_rope,
        query_scale=query_scale,
        sinks=is_gpt_oss,
    )
    _check_shape(spec)
    return spec


def _check_shape(spec: LlamaSpec) -> None:
    if spec.windows and spec.diffusion is not None:
        raise ModelError("the model has a sliding window; supported are diffusion models without one")
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
        refuse_quantised(config)


def is_packed(config: dict[str, Any]) -> bool:
    """Whether this is gpt-oss in MXFP4, the only supported quantised checkpoint (Ramet's own code only)."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    return (config.get("architectures"), method) == (["GptOssForCausalLM"], "mxfp4")


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
