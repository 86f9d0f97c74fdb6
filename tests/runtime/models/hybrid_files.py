"""GGUF files of small models with recurrent layers or experts, as llama.cpp's converter writes them."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from runtime.execution.mixers.mixer import reorder
from runtime.models.gguf import convert_gguf
from runtime.models.publishing import provide

Kind = gguf.GGMLQuantizationType

ARCHITECTURES = {"Lfm2": "lfm2", "Qwen3_5": "qwen35", "Qwen3Next": "qwen3next", "Qwen3Moe": "qwen3moe"}
ARCHITECTURES |= {"GptOss": "gpt-oss", "GraniteMoeHybrid": "granitehybrid"}
# Sizes that are multiples of the 32 values of a block.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GRANITE_SIZES: dict[str, Any] = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 96, "mamba_expand": 2,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
EXPERT_SIZES: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
DELTA_SIZES: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}


def round_weights(source: Path, kind: Kind) -> None:
    """Round a model's matrices to the values that `kind`, or MXFP4 of gpt-oss's experts, can hold."""
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        is_fused = name.endswith("_proj")
        own, rows = (Kind.MXFP4, weight.mT.contiguous()) if is_fused else (kind, weight)
        if weight.ndim > 1 and rows.shape[-1] % 32 == 0 and not name.endswith("_bias"):
            rows = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows.numpy(), own), own))
            weights[name] = rows.mT.contiguous() if is_fused else rows
    save_file(weights, source / "model.safetensors", {"format": "pt"})


def write_hybrid(source: Path, path: Path, kind: Kind | dict[str, Kind] | None = None, predicting: int = 0) -> Path:
    """Write a file of a Hugging Face directory.

    Args:
        kind: type of the matrices, also by the last part of their names; None: float32. Experts of gpt-oss are in
            MXFP4 instead.
        predicting: number of layers for the prediction of several tokens.
    """
    config = json.loads((source / "config.json").read_text())
    family = next(family for family in ARCHITECTURES if config["architectures"] == [f"{family}ForCausalLM"])
    architecture = ARCHITECTURES[family]
    writer, layers = gguf.GGUFWriter(path, architecture), config["num_hidden_layers"]
    writer.add_block_count(layers + predicting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if family == "Lfm2":
        counts = {"conv": 0, "full_attention": config["num_key_value_heads"]}
        writer.add_head_count_kv([counts[kind] for kind in config["layer_types"]])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif family == "GraniteMoeHybrid":
        _add_granite(writer, config)
    else:
        if family in ("Qwen3Moe", "GptOss"):
            _add_attention(writer, config)
        else:
            _add_delta(writer, config)
        if family != "Qwen3_5":
            writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            inner = config["intermediate_size" if family == "GptOss" else "moe_intermediate_size"]
            writer.add_expert_feed_forward_length(inner)
        if family == "Qwen3Next":
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        if family == "GptOss":
            rope = config["rope_parameters"]
            writer.add_sliding_window(config["sliding_window"])
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if predicting:
            writer.add_nextn_predict_layers(predicting)
    _add_tokenizer(writer, config)
    table = next(table for table, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(table, layers)
    weights = _stacked(load_file(source / "model.safetensors"))
    for name, weight in weights.items():
        for stored, data in _converted(name.replace("language_model.", ""), weight.float(), config, names):
            own = kind.get(stored.split(".")[-2]) if isinstance(kind, dict) else kind
            if family == "GptOss" and own is not None and stored.endswith("_exps.weight"):
                own = Kind.MXFP4
            if data.shape[-1] % 32 or data.ndim == 1 or "norm" in stored or stored.endswith("bias") or own is None:
                writer.add_tensor(stored, np.ascontiguousarray(data))
            else:
                writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(data), own), raw_dtype=own)
    for i in range(layers, layers + predicting):
        writer.add_tensor(f"blk.{i}.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def link(path: Path, target: Path) -> Path:
    return provide(target, partial(convert_gguf, path, linked=True))


def _add_attention(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def _add_delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _add_attention(writer, config)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def _add_tokenizer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(config["eos_token_id"])


def _converted(name: str, weight: torch.Tensor, config: dict[str, Any], names: Any) -> list[tuple[str, np.ndarray]]:
    """Tensors of the file for one of the model."""
    if "Granite" in config["architectures"][0]:
        return _converted_granite(name, weight, config, names)
    if name.endswith(".A_log"):
        weight = _reordered("A_log", weight, config)
        return [(names[name], (-weight.exp()).numpy())]
    is_centered = "linear_num_key_heads" in config  # the norms of Qwen's hybrids
    if name.endswith("norm.weight") and is_centered and "linear_attn" not in name:
        weight = weight + 1
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        weight = weight[:, 0]
    if name.endswith("in_proj_qkvz.weight"):
        keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
        values *= config["linear_num_value_heads"] // config["linear_num_key_heads"]
        *qkv, gate = reorder(weight, config["linear_num_key_heads"], keys, keys, values, values)
        layer = name.split(".")[2]
        return [
            (f"blk.{layer}.attn_qkv.weight", torch.cat(qkv).numpy()),
            (f"blk.{layer}.attn_gate.weight", gate.numpy()),
        ]
    if found := re.fullmatch(r"(.+\.experts\.)(gate_up|down)(_proj)(_bias)?", name):
        layer, part, end, bias = found.groups()
        weight = weight if bias else weight.mT
        parts = {"gate": weight[:, ::2], "up": weight[:, 1::2]} if part == "gate_up" else {"down": weight}
        kind = "bias" if bias else "weight"
        return [(f"{names[layer + part + end]}.{kind}", one.numpy()) for part, one in parts.items()]
    if ".linear_attn." in name:
        weight = _reordered(name.split(".linear_attn.")[1], weight, config)
    module, kind = name.replace(".dt_bias", ".dt_proj.bias").replace(".sinks", ".sinks.weight").rsplit(".", 1)
    return [(f"{names[module]}.{kind}", weight.numpy())]


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of each layer in one tensor, in the order of their numbers."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, weight in weights.items():
        whole, number = re.sub(r"\.experts\.\d+\.", ".experts.", name), re.search(r"\.experts\.(\d+)\.", name)
        found.setdefault(whole, {})[int(number[1]) if number else 0] = weight
    return {
        name: torch.stack([parts[i] for i in range(len(parts))]) if len(parts) > 1 else parts[0]
        for name, parts in found.items()
    }


def _converted_granite(
    name: str, weight: torch.Tensor, config: dict[str, Any], names: Any
) -> list[tuple[str, np.ndarray]]:
    if name.endswith((".A_log", ".D")):
        return [(names[name], (-weight.exp() if name.endswith(".A_log") else weight)[:, None].numpy())]
    layer, has_experts = "".join(name.split(".")[2:3]), bool(config["num_local_experts"])
    if name.endswith("input_linear.weight"):
        kind = "_exps" if "block_sparse_moe" in name else "_shexp" if has_experts else ""
        parts = zip(("gate", "up"), weight.chunk(2, dim=-2), strict=True)
        return [(f"blk.{layer}.ffn_{part}{kind}.weight", half.numpy()) for part, half in parts]
    if name.endswith("shared_mlp.output_linear.weight") and not has_experts:
        return [(f"blk.{layer}.ffn_down.weight", weight.numpy())]
    if name.endswith("conv1d.weight"):
        weight = weight[:, 0]
    if name.endswith("mamba.norm.weight"):
        weight = weight[None]
    for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{projection}." in name:
            weight = weight.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
    module, kind = name.replace(".dt_bias", ".dt_proj.bias").rsplit(".", 1)
    return [(f"{names[module]}.{kind}", weight.numpy())]


def _reordered(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The heads of values in the order of the file."""
    if config["architectures"] == ["Qwen3NextForCausalLM"]:
        return weight
    dim = config["linear_value_head_dim"]
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return torch.cat((weight[:keys], _tiled(weight[keys:], 0, dim, config)))
    if name in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"):
        return _tiled(weight, 0, 1, config)
    if name in ("in_proj_z.weight", "out_proj.weight"):
        return _tiled(weight, 1 if name.startswith("out") else 0, dim, config)
    return weight


def _tiled(weight: torch.Tensor, axis: int, dim: int, config: dict[str, Any]) -> torch.Tensor:
    parts = weight.unflatten(axis, (config["linear_num_key_heads"], -1, dim))
    return parts.transpose(axis, axis + 1).flatten(axis, axis + 2).contiguous()
