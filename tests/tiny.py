"""Small random models of every supported architecture, made by transformers."""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

# Of models that are asked by token ids alone, and of those with the default model's tokenizer: three times as long to
# load, and twice as long to run.
VOCAB, WITH_TOKENIZER = 4096, 49152

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}


def _rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 128}

_TIED = _BASE | {"tie_word_embeddings": True}
_LATENT = _BASE | {"num_key_value_heads": 6, "num_hidden_layers": 2, "first_k_dense_replace": 1}
_WINDOWS = _TIED | {"num_hidden_layers": 4}
TINY_MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_BASE),
    "llama_tied_biases": LlamaConfig(**_TIED, attention_bias=True, mlp_bias=True),
    "llama_linear": LlamaConfig(**_BASE, **_rope(rope_type="linear", factor=2.0)),
    "llama_llama3": LlamaConfig(**_BASE, **_rope(rope_type="llama3", **_LLAMA3)),
    "llama_yarn": LlamaConfig(**_BASE, **_rope(rope_type="yarn", **_YARN)),
    "mistral": MistralConfig(**_BASE, head_dim=16, sliding_window=None),
    "qwen2": Qwen2Config(**_BASE),
    "qwen3": Qwen3Config(**_BASE, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **_LATENT,
        kv_lora_rank=24, q_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=24,
        n_group=2, topk_group=1,
        **_rope(rope_type="yarn", mscale=1.0, mscale_all_dim=0.7, **_YARN),
    ),
    "gemma3": Gemma3TextConfig(
        **_WINDOWS,
        head_dim=16, query_pre_attn_scalar=24, sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
}  # fmt: skip


def vary(model: nn.Module) -> None:
    """Make biases and norms random, and matrices so wide that greedy continuations differ from prompt to prompt."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(6)


def save_tiny(kind: str, directory: Path, tokenizer_from: Path | None = None, **save_options: Any) -> Path:
    """Write a random model of a kind as a Hugging Face directory, biases and norms random too."""
    torch.manual_seed(sum(kind.encode()))
    config = copy.deepcopy(TINY_MODELS[kind])
    if tokenizer_from is not None:
        config.vocab_size = WITH_TOKENIZER
    model = AutoModelForCausalLM.from_config(config)
    vary(model)
    model.save_pretrained(directory, **save_options)
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer_from is not None else ():
        shutil.copy(tokenizer_from / name, directory / name)
    return directory
