"""Small random diffusion models of every supported kind, as their authors' checkpoints name things."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, MASK, EOS = 300, 299, 298
HIDDEN, INNER, HEADS, HEAD_DIM, CONTEXT = 48, 80, 4, 12, 512
KINDS = ("llada", "dream", "llama_diffusion")


def save_tiny(kind: str, directory: Path, layers: int = 4, tokenizer_from: Path | None = None) -> Path:
    """Write a random model of a kind as a Hugging Face directory; with a tokenizer, for all of its tokens."""
    draw = torch.Generator().manual_seed(sum(kind.encode()) + layers)
    makers = {
        "llada": _llada, "dream": _dream, "llama_diffusion": _llama, "sdar": _sdar, "sdar_moe": _sdar_moe,
        "fast_dllm": _fast_dllm, "llada2": _llada2,
    }  # fmt: skip
    config, shapes = makers[kind](layers)
    vocab = VOCAB
    if tokenizer_from is not None:
        vocab = 49152
        config |= {"vocab_size": vocab, "embedding_size": vocab, "mask_token_id": 3, "eos_token_id": 2}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, shape in shapes.items():
        shape = tuple(vocab if size == VOCAB else size for size in shape)
        noise = torch.randn(shape, generator=draw)
        if len(shape) == 1:
            tensors[name] = noise * 0.1 + ("norm" in name or "ln_f" in name)
        else:
            # Wide enough that what is generated differs from prompt to prompt.
            tensors[name] = noise * (1.0 if shape[0] == vocab else 1.4 / shape[1] ** 0.5)
    save_file(tensors, directory / "model.safetensors")
    if tokenizer_from is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer_from / name, directory / name)
    return directory


def _llada(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": HIDDEN, "n_layers": layers,
        "n_heads": HEADS, "n_kv_heads": HEADS, "mlp_hidden_size": INNER, "mlp_ratio": 4, "vocab_size": VOCAB,
        "embedding_size": VOCAB, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "max_sequence_length": CONTEXT,
        "block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True, "alibi": False,
        "include_bias": False, "include_qkv_bias": False, "weight_tying": False, "mask_token_id": MASK,
        "eos_token_id": EOS, "pad_token_id": EOS,
    }  # fmt: skip
    q = HEADS * HEAD_DIM
    layer = {
        "attn_norm": (HIDDEN,), "ff_norm": (HIDDEN,), "q_proj": (q, HIDDEN), "k_proj": (q, HIDDEN),
        "v_proj": (q, HIDDEN), "attn_out": (HIDDEN, q), "ff_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN),
        "ff_out": (HIDDEN, INNER),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"wte": (VOCAB, HIDDEN), "ln_f": (HIDDEN,), "ff_out": (VOCAB, HIDDEN)}
    for i in range(layers):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    return config, {f"model.transformer.{name}.weight": shape for name, shape in shapes.items()}


def _dream(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config, shapes = _decoder(layers, kv_heads=2, biases=True, tied=False)
    config |= {"architectures": ["DreamModel"], "model_type": "Dream", "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
    return config | {"use_sliding_window": False, "pad_token_id": EOS}, shapes


def _llama(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config, shapes = _decoder(layers, kv_heads=1, biases=False, tied=True)
    config |= {"architectures": ["LlamaDiffusionModel"], "model_type": "llama_diffusion", "rms_norm_eps": 1e-5}
    return config | {"logits_shift": 1, "rope_theta": 10000.0}, shapes


def _sdar(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config, shapes = _decoder(layers, kv_heads=2, biases=False, tied=False)
    for i in range(layers):
        shapes |= {f"model.layers.{i}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    config |= {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "rope_theta": 1000000.0}
    return config | {"rms_norm_eps": 1e-6, "head_dim": HEAD_DIM, "block_length": 4}, shapes


def _sdar_moe(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config, shapes = _sdar(layers)
    config |= {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "num_experts": 6}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0]}
    return config, _with_experts(shapes, range(1, layers), 6, 24)


def _llada2(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config, shapes = _sdar(layers)
    config |= {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "first_k_dense_replace": 1, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "num_shared_experts": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "rope_theta": 600000, "use_bias": False,
        "use_qkv_bias": False, "use_qk_norm": True, "norm_head": False, "sliding_window": 4096, "block_length": 8,
        "pad_token_id": EOS,
    }  # fmt: skip
    del config["eos_token_id"]
    shapes = _with_experts(shapes, range(1, layers), 8, 20)
    for i in range(layers):
        if i:
            shapes[f"model.layers.{i}.mlp.gate.expert_bias"] = (8,)
            prefix = f"model.layers.{i}.mlp.shared_experts."
            shapes |= {f"{prefix}{name}_proj.weight": (20, HIDDEN) for name in ("gate", "up")}
            shapes[f"{prefix}down_proj.weight"] = (HIDDEN, 20)
        attention = f"model.layers.{i}.self_attn."
        rows = sum(shapes.pop(f"{attention}{name}_proj.weight")[0] for name in "qkv")
        shapes[f"{attention}query_key_value.weight"] = (rows, HIDDEN)
    theirs = {
        "embed_tokens": "word_embeddings", "self_attn.o_proj": "self_attn.dense", "q_norm": "query_layernorm",
        "k_norm": "key_layernorm", "self_attn": "attention",
    }  # fmt: skip
    for ours, name in theirs.items():
        shapes = {key.replace(ours, name): shape for key, shape in shapes.items()}
    return config, shapes


def _with_experts(shapes: dict[str, Any], layers: range, count: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The shapes with experts in place of the MLPs of some layers."""
    for i in layers:
        mlp = f"model.layers.{i}.mlp."
        shapes[f"{mlp}gate.weight"] = (count, HIDDEN)
        for name in ("gate", "up", "down"):
            del shapes[f"{mlp}{name}_proj.weight"]
            size = (HIDDEN, inner) if name == "down" else (inner, HIDDEN)
            shapes |= {f"{mlp}experts.{expert}.{name}_proj.weight": size for expert in range(count)}
    return shapes


def _fast_dllm(layers: int) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config, shapes = _decoder(layers, kv_heads=2, biases=True, tied=True)
    config |= {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 16}
    return config | {"rope_theta": 1000000.0, "rms_norm_eps": 1e-6}, shapes


def _decoder(layers: int, kv_heads: int, biases: bool, tied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    config = {
        "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads, "intermediate_size": INNER, "vocab_size": VOCAB, "hidden_act": "silu",
        "max_position_embeddings": CONTEXT, "tie_word_embeddings": tied, "mask_token_id": MASK, "eos_token_id": EOS,
    }  # fmt: skip
    q, kv = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if biases:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {
            f"{layer}self_attn.o_proj.weight": (HIDDEN, q),
            f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{layer}input_layernorm.weight": (HIDDEN,),
            f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        }
    return config, shapes
