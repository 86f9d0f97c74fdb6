"""Diffusion models: config keys, tensor names, mask tokens, and the settings that their authors recommend."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from runtime.asks import Algorithm, NoiseParams
from runtime.errors import ModelError
from runtime.models.config_json import positive_size

# architecture -> decoder family
FAMILIES = {
    "LLaDAModelLM": "Llama",
    "DreamModel": "Qwen2",
    "LlamaDiffusionModel": "Llama",
    "SDARForCausalLM": "Qwen3",
    "SDARMoeForCausalLM": "Qwen3",
    "LLaDA2MoeModelLM": "Qwen3",
    "Fast_dLLM_QwenForCausalLM": "Qwen2",
}

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"
# DiffusionGemma's settings: names in generation_config.json, Ramet's names and transformers' defaults.
_NOISE = {
    "max_denoising_steps": ("steps", 48),
    "t_min": ("t_min", 0.4),
    "t_max": ("t_max", 0.8),
    "stability_threshold": ("stability_threshold", 1),
    "confidence_threshold": ("confidence_threshold", 0.005),
}
_SAMPLER = "EntropyBoundSamplerConfig"

# Switches of LLaDA's configuration, with the values of its published models; others are refused.
_LLADA_SWITCHES: dict[str, Any] = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "bias_for_layer_norm": False,
}
_LLADA2_SWITCHES: dict[str, Any] = {
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "image_token_offset": None,
}
_LLADA_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
_LLADA_OUTER = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}

_LLADA2_PARTS = {
    "embed_tokens": "word_embeddings",
    "self_attn.qkv_proj": "attention.query_key_value",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}

# <|eot_id|>, which ends a turn of LLaDA's instruct models. Their configuration lists only <|endoftext|>.
_LLADA_END_OF_TURN = 126348


@dataclass(frozen=True, slots=True)
class DiffusionSpec:
    """The properties of a diffusion model.

    Attributes:
        mask_token_id: the token of undecided positions; -1: no mask, canvases start with random tokens.
        logits_shift: the logits of token i are in row i - logits_shift.
        algorithm: the sampler of the model's authors.
        attended: size of the attention blocks, in which a position sees its own block and those before it (block
            diffusion); None: every position sees all positions.
        block: default number of positions that are denoised together.
        threshold: default confidence at which a mask is decided; None: a schedule decides.
        edits: whether requests may use `joint_threshold`, which replaces decided tokens.
        defaults: the model's defaults for other fields of `NoiseParams`.
    """

    mask_token_id: int
    logits_shift: int
    algorithm: Algorithm
    attended: int | None = None
    block: int = 32
    threshold: float | None = None
    edits: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)


_SDAR = DiffusionSpec(151669, 0, "low_confidence", attended=4, block=4, threshold=0.85)
# Published block diffusion models. A configuration may override the mask token and the block size.
_BLOCKS = {
    "SDARForCausalLM": _SDAR,
    "SDARMoeForCausalLM": _SDAR,
    # Only LLaDA2.1 was trained to edit, but LLaDA2.0 has the same configuration.
    "LLaDA2MoeModelLM": DiffusionSpec(156895, 0, "low_confidence", attended=32, block=32, threshold=0.95, edits=True),
    "Fast_dLLM_QwenForCausalLM": DiffusionSpec(151665, 1, "low_confidence", attended=32, block=8, threshold=0.9),
}
_BLOCK_NAMES = ("block_length", "block_size", "bd_size")


def diffusion_spec(config: dict[str, Any], architecture: str) -> DiffusionSpec | None:
    """The DiffusionSpec of a configuration; None for a causal model. Raises KeyError (missing key), ModelError."""
    if architecture not in FAMILIES:
        return None
    published = _BLOCKS.get(architecture)
    mask = config.get("mask_token_id", published.mask_token_id) if published else config["mask_token_id"]
    vocab = config["vocab_size"]
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab:
        raise ModelError(f"config.json has mask_token_id {mask!r}; it must be one of the {vocab} tokens")
    if architecture == "LLaDAModelLM":
        return DiffusionSpec(mask, 0, "low_confidence")
    if architecture == "DreamModel":
        return DiffusionSpec(mask, 1, "entropy")
    if published is not None:
        return _by_config(published, mask, config)
    shift = config.get("logits_shift", 1)
    if shift not in (0, 1):
        raise ModelError(f"config.json has logits_shift {shift!r}; supported are 0 and 1")
    return DiffusionSpec(mask, shift, "low_confidence")


def canvas_spec(config: dict[str, Any], generation: dict[str, Any]) -> DiffusionSpec:
    """The spec of DiffusionGemma, from config.json and generation_config.json. Raises ModelError."""
    length = positive_size(config, "canvas_length", 256)
    context = config.get("text_config", {}).get("max_position_embeddings", length + 1)
    if length >= context:
        raise ModelError(f"config.json has canvas_length {length}; it leaves no room for a prompt in {context} tokens")
    given = {name: generation[name] for name in _NOISE if generation.get(name) is not None}
    defaults = {own: given.get(name, value) for name, (own, value) in _NOISE.items()}
    sampler = generation.get("sampler_config")
    sampler = {} if sampler is None else sampler
    if not isinstance(sampler, dict) or sampler.get("_cls_name", _SAMPLER) != _SAMPLER:
        raise ModelError(f"generation_config.json has sampler_config {sampler!r}; supported is an {_SAMPLER}")
    bound = sampler.get("entropy_bound")
    defaults["entropy_bound"] = 0.1 if bound is None else bound
    try:
        NoiseParams.model_validate(defaults, strict=True)
    except ValidationError as error:
        (own, *_), reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
        name = next((name for name, (each, _) in _NOISE.items() if each == own), own)
        raise ModelError(f"generation_config.json has a {name} that cannot be used: {reason}") from None
    if defaults["t_min"] > defaults["t_max"]:
        raise ModelError(f"the model's t_min is {defaults['t_min']}, more than its t_max, {defaults['t_max']}")
    return DiffusionSpec(-1, 0, "entropy_bound", attended=1, block=length, defaults=defaults)


def _by_config(published: DiffusionSpec, mask: int, config: dict[str, Any]) -> DiffusionSpec:
    """The published spec with the mask token and block size of a configuration. Raises ModelError."""
    name = next((name for name in _BLOCK_NAMES if config.get(name) is not None), _BLOCK_NAMES[0])
    attended = positive_size(config, name, published.attended)
    block = attended if attended % published.block else published.block
    return replace(published, mask_token_id=mask, attended=attended, block=block)


def as_llama(config: dict[str, Any]) -> dict[str, Any]:
    """Translate LLaDA's configuration to Llama's keys. Raises KeyError (missing key), ModelError (switches)."""
    _check_switches(config, _LLADA_SWITCHES)
    width, heads = config["d_model"], config["n_heads"]
    vocab = config.get("embedding_size") or config["vocab_size"]
    eos = config.get("eos_token_id")
    ends = [eos] if isinstance(eos, int) else list(eos or [])
    return {
        "architectures": config.get("architectures"),
        "model_type": config.get("model_type"),
        "hidden_size": width,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("n_kv_heads") or (1 if config.get("multi_query_attention") else heads),
        "intermediate_size": config.get("mlp_hidden_size") or int(config["mlp_ratio"] * width),
        "vocab_size": vocab,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "tie_word_embeddings": config.get("weight_tying", False),
        "max_position_embeddings": config["max_sequence_length"],
        "rope_theta": config.get("rope_theta", 10000.0),
        "mask_token_id": config["mask_token_id"],
        "eos_token_id": [*ends, _LLADA_END_OF_TURN] if vocab > _LLADA_END_OF_TURN else ends,
        "bos_token_id": config.get("bos_token_id"),
    }


def _check_switches(config: dict[str, Any], switches: dict[str, Any]) -> None:
    for name, value in switches.items():
        if (found := config.get(name, value)) != value:
            raise ModelError(f"config.json has {name} {found!r}; supported is {value!r}")


def as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA2's configuration with the authors' defaults filled in. Raises ModelError for unsupported switches."""
    _check_switches(config, _LLADA2_SWITCHES)
    given = {name: value for name, value in config.items() if value is not None}
    return {"partial_rotary_factor": 0.5, "eos_token_id": config.get("pad_token_id")} | given


def llada2_name(name: str) -> str:
    """The name of a Llama tensor in LLaDA2's checkpoints."""
    for ours, theirs in _LLADA2_PARTS.items():
        name = name.replace(ours, theirs)
    return name


def llada_name(name: str) -> str:
    """The name of a Llama tensor in LLaDA's checkpoints."""
    module, _, kind = name.rpartition(".")
    if module in _LLADA_OUTER:
        return f"model.transformer.{_LLADA_OUTER[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"model.transformer.blocks.{layer}.{_LLADA_LAYER[inner]}.{kind}"
