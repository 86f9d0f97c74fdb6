"""Small random models of many families, written by transformers' configurations, for a comparison with transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from loadgen.experiments.gpu.correctness import greedy

_BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 40}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 24, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 48,
}  # fmt: skip
_OF_64 = {"head_dim": 64}

_FLASHINFER, _TORCH = ({"dtype": "bfloat16", "kernels": kernels} for kernels in ("flashinfer", "torch"))
_FLOAT32 = {"dtype": "float32"}

# By name: the class without `ForCausalLM`, options of the engine, and fields. FlashInfer has kernels for heads of 64.
FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "Llama": ("Llama", _FLASHINFER, _OF_64),
    "Qwen2": ("Qwen2", _FLASHINFER, {"use_sliding_window": False}),
    "Qwen3": ("Qwen3", _FLASHINFER, _OF_64),
    "Mistral": ("Mistral", _FLASHINFER, _OF_64 | {"sliding_window": None}),
    "Mistral with a window": ("Mistral", _FLASHINFER, _OF_64 | {"sliding_window": 40}),
    "Qwen3-MoE": ("Qwen3Moe", _FLASHINFER, _OF_64 | _EXPERTS),
    "Mixtral": ("Mixtral", _FLOAT32, _OF_64 | {"num_local_experts": 8, "sliding_window": None}),
    "Gemma 3 in bfloat16": ("Gemma3", _TORCH, _OF_64 | _WINDOWS),
    "gpt-oss in bfloat16": ("GptOss", _TORCH, _OF_64 | _WINDOWS | {"num_local_experts": 8}),
    "Qwen3-MoE in float32": ("Qwen3Moe", _FLOAT32, _OF_64 | _EXPERTS),
    "Phi-3": ("Phi3", _FLOAT32, {"sliding_window": None}),
    "Gemma 3": ("Gemma3", _FLOAT32, _OF_64 | _WINDOWS),
    "DeepSeek-V3": ("DeepseekV3", _FLOAT32, _LATENT),
    "gpt-oss": ("GptOss", _FLOAT32, _OF_64 | _WINDOWS | {"num_local_experts": 8}),
    "Qwen3-Next": ("Qwen3Next", _FLOAT32, _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "Qwen3.5": ("Qwen3_5", _FLOAT32, _DELTA),
    "LFM2": ("Lfm2", _FLOAT32, {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
}


def write_family(name: str, directory: Path) -> Path:
    """Write a checkpoint of a family with random weights, norms and biases too."""
    architecture, _, fields = FAMILIES[name]
    kind = getattr(transformers, f"{architecture}ForCausalLM")
    torch.manual_seed(1)
    given = _BASE | fields
    model = kind(kind.config_class(**given))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 or parameter_name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in parameter_name:
                parameter.mul_(3)  # as in `random_model`
    path = directory / name.replace(" ", "-")
    model.save_pretrained(path)
    return path


def compare_family(name: str, directory: Path, device: str) -> dict[str, float]:
    """See `greedy`, of a model of this family."""
    return greedy(write_family(name, directory), device, FAMILIES[name][1])
