"""Hybrid models in GGUF files: what their metadata and tensors have beside other models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.models.gguf_tensors import GGUFTensors

# Architectures, and the names of model and configuration in transformers.
HYBRIDS = {
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
}
# The hybrid that transformers' code computes.
GRANITE = "granitehybrid"
# Granite's tensors by their names in the file, the layers' without the layer. `:0` and `:1` are parts of one tensor.
_GRANITE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"attn_{name}.{kind}": f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")},
    **{f"attn_output.{kind}": f"self_attn.o_proj.{kind}" for kind in ("weight", "bias")},
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight:0",
    "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight:1",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    **{f"ffn_gate{shared}.weight": "shared_mlp.input_linear.weight:0" for shared in ("", "_shexp")},
    **{f"ffn_up{shared}.weight": "shared_mlp.input_linear.weight:1" for shared in ("", "_shexp")},
    **{f"ffn_down{shared}.weight": "shared_mlp.output_linear.weight" for shared in ("", "_shexp")},
}
Get = Callable[..., Any]


def hybrid_keys(architecture: str, get: Get, layers: int, head_dim: int) -> dict[str, Any]:
    """Keys of config.json. `get`: reads a metadata field. Raises ModelError."""
    if architecture == "lfm2":
        return _lfm2_keys(get)
    if architecture == GRANITE:
        return _granite_keys(get, head_dim)
    keys = _delta_keys(get, layers, head_dim)
    # llama.cpp's converter orders the heads of Qwen3.5 so. Of Qwen3-Next, it separates the grouped projections.
    return keys | (
        {"linear_value_heads_tiled": True}
        if architecture == "qwen35"
        else expert_keys(get)
        | {
            "shared_expert_intermediate_size": get("expert_shared_feed_forward_length"),
            "linear_projections_separate": True,
        }
    )


def _lfm2_keys(get: Get) -> dict[str, Any]:
    if get("attention.sliding_window", 0):
        raise ModelError("the file has lfm2.attention.sliding_window; supported is LFM2 without windows")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in get("attention.head_count_kv")],
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
    }


def expert_keys(get: Get) -> dict[str, Any]:
    return {
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def gpt_oss_keys(get: Get) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "num_local_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "intermediate_size": get("expert_feed_forward_length"),
        "experts_separate": True,
        "sliding_window": get("attention.sliding_window"),
        # Not the default of the family, if the file has none.
        "rope_scaling": None,
    }


def _granite_keys(get: Get, head_dim: int) -> dict[str, Any]:
    inner, heads = get("ssm.inner_size"), get("ssm.time_step_rank")
    return {
        "layer_types": ["attention" if count else "mamba" for count in get("attention.head_count_kv")],
        "mamba_d_conv": get("ssm.conv_kernel"),
        "mamba_d_state": get("ssm.state_size"),
        "mamba_n_groups": get("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // get("embedding_length"),
        "num_local_experts": get("expert_count", 0),
        "num_experts_per_tok": get("expert_used_count", 0),
        "shared_intermediate_size": get("expert_shared_feed_forward_length"),
        "embedding_multiplier": get("embedding_scale", 1.0),
        "residual_multiplier": get("residual_scale", 1.0),
        "attention_multiplier": get("attention.scale", head_dim**-0.5),
        "logits_scaling": get("logit_scale", 1.0),
        "position_embedding_type": "rope" if get("rope.scaling.finetuned", True) else None,
    }


def granite_tensors(path: Path, tensors: list[Any], config: dict[str, Any]) -> GGUFTensors:
    """The tensors of a reader. Raises ModelError for one that the model does not use."""
    table: dict[str, list[Any]] = {}
    for tensor in tensors:
        layer, name = tensor.name.split(".")[1], tensor.name
        if in_layer := name.startswith("blk."):
            name = name.split(".", 2)[2]
        if name not in _GRANITE:
            raise ModelError(f"{path.name} has a tensor {tensor.name}, which this model does not use")
        shape = [int(size) for size in reversed(tensor.shape)]
        if name == "ssm_conv1d.weight":
            shape.insert(1, 1)
        elif name in ("ssm_a", "ssm_d", "ssm_norm.weight"):
            shape = [shape[0] * shape[1]]
        target = f"model.layers.{layer}.{_GRANITE[name]}" if in_layer else _GRANITE[name]
        table[target] = [tensor.tensor_type.name, shape, int(tensor.data_offset)]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return GGUFTensors(path, table, heads, 0.0)
