"""Hybrid models in GGUF files: what their metadata and tensors have beside other models."""

from collections.abc import Callable
from typing import Any

from runtime.errors import ModelError

# Architectures, and the names of model and configuration in transformers.
HYBRIDS = {
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
}
Get = Callable[..., Any]


def hybrid_keys(architecture: str, get: Get, layers: int, head_dim: int) -> dict[str, Any]:
    """Keys of config.json. `get`: reads a metadata field. Raises ModelError."""
    return _lfm2_keys(get) if architecture == "lfm2" else _delta_keys(get, layers, head_dim)


def _lfm2_keys(get: Get) -> dict[str, Any]:
    if get("attention.sliding_window", 0):
        raise ModelError("the file has lfm2.attention.sliding_window; supported is LFM2 without windows")
    kv_heads = get("attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "num_key_value_heads": max(kv_heads),
        "conv_L_cache": get("shortconv.l_cache"),
        "norm_eps": get("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _delta_keys(get: Get, layers: int, head_dim: int) -> dict[str, Any]:
    every, v_heads = get("full_attention_interval", 4), get("ssm.time_step_rank")
    recurrent = get("attention.recurrent_layers", [(i + 1) % every != 0 for i in range(layers)])
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "partial_rotary_factor": get("rope.dimension_count") / head_dim,
        "linear_conv_kernel_dim": get("ssm.conv_kernel"),
        "linear_num_key_heads": get("ssm.group_count"),
        "linear_num_value_heads": v_heads,
        "linear_key_head_dim": get("ssm.state_size"),
        "linear_value_head_dim": get("ssm.inner_size") // v_heads,
        # llama.cpp's converter orders them so.
        "linear_value_heads_tiled": True,
    }
