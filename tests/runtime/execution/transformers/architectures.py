"""Small random models of many architectures, made by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import vary

VOCAB = 320

# Sizes by the names that configurations give them; each takes those that it has.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 9,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48,
    "n_positions": 256, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 16, "num_shared_experts": 1, "n_shared_experts": 1, "moe_k": 2,
    "moe_num_experts": 4, "first_k_dense_replace": 1, "num_dense_layers": 1, "attention_chunk_size": 9,
}  # fmt: skip
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MLA = {"head_dim": None, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4}
_MLA |= {"qk_nope_head_dim": 8, "v_head_dim": 6}

_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}

# Name of the class without `ForCausalLM` or `LMHeadModel`, and fields beside the sizes; None: not set.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Afmoe": _WINDOWS,
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "BitNet": {},
    "Cohere": {},
    "Cohere2": _WINDOWS,
    "Cwm": _WINDOWS,
    "DeepseekV2": _MLA,
    "DeepseekV3": _MLA,
    "Dots1": _WINDOWS,
    "Ernie4_5": {},
    "Ernie4_5_Moe": {},
    "Exaone4": _WINDOWS,
    "FlexOlmo": {},
    "Gemma": {},
    "Gemma2": _WINDOWS,
    "Gemma3": _WINDOWS,
    "Gemma3n": {
        **_PER_LAYER,
        "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "altup_num_inputs": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "Gemma4": {**_PER_LAYER, **_WINDOWS, "global_head_dim": 16},
    "Glm": {},
    "Glm4": {},
    "Glm4Moe": {},
    "GPT2": {},
    "GPTBigCode": {},
    "GPTNeoX": {},
    "GptOss": _WINDOWS,
    "Granite": {},
    "GraniteMoe": {},
    "Helium": {},
    "HunYuanDenseV1": {},
    "HunYuanMoEV1": {},
    "Jais2": {},
    "Llama": {},
    "Llama4": {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    "MiniMaxM2": {},
    "Ministral": _WINDOWS,
    "Ministral3": {},
    "Mistral": {},
    "Mixtral": {},
    "NanoChat": {},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": _WINDOWS,
    "Olmoe": {},
    "OPT": {"tie_word_embeddings": False},
    "Persimmon": {},
    "Phi": {},
    "Phi3": {},
    "Phimoe": {},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen2Moe": {},
    "Qwen3": {},
    "Qwen3Moe": {},
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
}  # fmt: skip


def class_name(architecture: str) -> str:
    """The name of the model's class."""
    return architecture + ("LMHeadModel" if architecture == "GPT2" else "ForCausalLM")


def save_small(architecture: str, directory: Path, **more: Any) -> Path:
    """Write a random model as a Hugging Face directory without a tokenizer."""
    kind = getattr(transformers, class_name(architecture))
    known = set(dir(kind.config_class)) | set(kind.config_class().to_dict())
    fields = {name: value for name, value in _SMALL.items() if name in known}
    fields = {
        name: value for name, value in {**fields, **ARCHITECTURES[architecture], **more}.items() if value is not None
    }
    torch.manual_seed(1)
    model = kind(kind.config_class(**fields))
    vary(model)
    model.save_pretrained(directory)
    return directory
