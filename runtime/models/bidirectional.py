"""Models whose rows also see later rows: config keys, tensor names, and how far a row sees."""

from typing import Any

from runtime.errors import ModelError
from runtime.models.config_json import positive_size

# architecture -> decoder family
BIDIRECTIONAL = {
    "LLaDAModelLM": "Llama",
    "DreamModel": "Qwen2",
    "LlamaDiffusionModel": "Llama",
    "SDARForCausalLM": "Qwen3",
    "SDARMoeForCausalLM": "Qwen3",
    "LLaDA2MoeModelLM": "Qwen3",
    "Fast_dLLM_QwenForCausalLM": "Qwen2",
}
# Published sizes of attention blocks. A configuration may override them.
_BLOCKS = {
    "SDARForCausalLM": 4,
    "SDARMoeForCausalLM": 4,
    "LLaDA2MoeModelLM": 32,
    "Fast_dLLM_QwenForCausalLM": 32,
}
_BLOCK_NAMES = ("block_length", "block_size", "bd_size")

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


def block_size(config: dict[str, Any], architecture: str) -> int | None:
    """Size of the blocks of rows that see each other and all blocks before; None: the model has none.

    Raises ModelError.
    """
    if (published := _BLOCKS.get(architecture)) is None:
        return None
    name = next((name for name in _BLOCK_NAMES if config.get(name) is not None), _BLOCK_NAMES[0])
    return positive_size(config, name, published)


def as_causal(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """A configuration of `BIDIRECTIONAL` with the keys of its family. Raises KeyError (missing key), ModelError."""
    if architecture == "LLaDAModelLM":
        return _as_llama(config)
    return _as_qwen3(config) if architecture == "LLaDA2MoeModelLM" else config


def _as_llama(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA's configuration with Llama's keys."""
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


def _as_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA2's configuration with the authors' defaults filled in."""
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
