"""Conversion of GGUF files to Hugging Face directories: configuration, tokenizer, and tensors or their places."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import ModelError
from runtime.models.gguf_hybrid import GRANITE, HYBRIDS, expert_keys, gpt_oss_keys, granite_tensors, hybrid_keys
from runtime.models.gguf_tensors import ROPE_FACTORS, GGUFTensors, parts_of, read_gguf
from runtime.models.spec import DecoderSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    **{architecture: name for architecture, (name, _) in HYBRIDS.items()},
}

# Texts of tokens that end an answer. Files name one or two of them, and models write others as well.
_ENDS = (
    "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>",
    "<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
)  # fmt: skip


def convert_gguf(path: Path, work: Path, linked: bool = False, rounded: bool = False) -> None:
    """Convert a GGUF file, or all parts of one, into a Hugging Face model directory.

    It is written to the existing directory `work`.
    Quantised tensors become float32, which is exact, or bfloat16 with `rounded`; float16 and bfloat16 tensors keep
    their type. Only one tensor at a time is in memory. With `linked`, the directory has no tensors: it names the file,
    unless transformers' code computes the model.

    Raises:
        ModelError: if the file is not a complete GGUF file of a supported architecture.
        OSError: if the disk is full.
    """
    path = parts_of(path)[0]
    metadata, tensors = read_gguf(path)
    config = write_config(path, metadata, tensors, work)
    with _as_model_error(path):
        _write(path, metadata, tensors, config, work, linked, rounded)


def write_config(path: Path, metadata: dict[str, Any], tensors: list[Any], work: Path) -> dict[str, Any]:
    """Write the `config.json` of a GGUF file, and return it. Raises ModelError."""
    architecture = metadata.get("general.architecture")
    if architecture == "clip":
        raise ModelError(
            f"{path.name} is a projector (mmproj) and no model; images are served with safetensors alone, and the "
            "model's own GGUF file without images"
        )
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"{path.name}: architecture {architecture!r}; supported in GGUF are {supported}")
    with _as_model_error(path):
        if architecture == "gemma3":
            config = _gemma_config(path, metadata, tensors)
        else:
            config = _config(path, metadata, architecture, tensors)
        _write_json(work / "config.json", config)
    return config


@contextmanager
def _as_model_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{path.name} has metadata of the wrong kind: {error}") from None


def _write(
    path: Path,
    metadata: dict[str, Any],
    tensors: list[Any],
    config: dict[str, Any],
    work: Path,
    linked: bool,
    rounded: bool,
) -> None:
    architecture = metadata["general.architecture"]
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
    _write_json(work / "generation_config.json", ids)
    _write_tokenizer(path, metadata, work)
    if architecture == GRANITE:
        granite_tensors(path, tensors, config).write(work / "model.safetensors", rounded)
        return
    spec = DecoderSpec.load(work)
    predicting = [f"blk.{i}." for i in range(spec.num_layers, metadata.get(f"{architecture}.block_count", 0))]
    tensors = [one for one in tensors if not one.name.startswith(tuple(predicting))]
    stored = GGUFTensors.named(path, tensors, architecture, spec)
    if linked:
        stored.link(work)
    elif architecture in (*HYBRIDS, "gpt-oss"):
        raise ModelError(f"{path.name}: --model-impl transformers is not served with GGUF files of {architecture}")
    else:
        stored.write(work / "model.safetensors", rounded)


def _gemma_config(path: Path, metadata: dict[str, Any], tensors: list[Any]) -> dict[str, Any]:
    """What transformers reads from the metadata."""
    from transformers import AutoConfig

    # Gemma 3 has rope scaling from 4 billion parameters on; transformers ignores it.
    if found := [name for name in metadata if ".rope.scaling." in name]:
        raise ModelError(f"{path.name} has {found[0]}; supported in GGUF is this architecture without rope scaling")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    own = {"architectures": [ARCHITECTURES["gemma3"]], "eos_token_id": _ends(metadata), "tie_word_embeddings": tied}
    return config | own


def _config(path: Path, metadata: dict[str, Any], architecture: str, tensors: list[Any]) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelError(f"{path.name} has no metadata field {architecture}.{name}")
        return value

    shapes = {tensor.name: tensor.shape for tensor in tensors}
    heads, hidden = get("attention.head_count"), get("embedding_length")
    kv_heads = get("attention.head_count_kv", heads)
    head_dim = get("attention.key_length", hidden // heads)
    # The last layers may be for the prediction of several tokens, which is not served.
    layers = get("block_count") - get("nextn_predict_layers", 0)
    if (rotated := get("rope.dimension_count", head_dim)) != head_dim and architecture not in ("qwen35", "qwen3next"):
        raise ModelError(f"{path.name} rotates {rotated} of {head_dim} dimensions of a head; supported is all of them")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        # A list has the number of each layer, 0 for recurrent ones.
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"),
        # The embedding may have more rows than the tokenizer has tokens.
        "vocab_size": int(shapes["token_embd.weight"][1]) if "token_embd.weight" in shapes else len(tokens),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if architecture == "llama" and (window := metadata.get("llama.attention.sliding_window")):
        # llama.cpp calls Mistral a Llama; its converter writes the window only sometimes.
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if architecture in HYBRIDS:
        config |= {"model_type": HYBRIDS[architecture][1], **hybrid_keys(architecture, get, layers, head_dim)}
    elif architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if architecture == "qwen3moe":
        config |= {"model_type": "qwen3_moe", **expert_keys(get)}
    if architecture == "gpt-oss":
        config |= gpt_oss_keys(get)
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    if scaling := _rope_scaling(path, metadata, architecture, config, tensors):
        config["rope_scaling"] = scaling
    return config


def _ends(metadata: dict[str, Any]) -> int | list[int] | None:
    """The token ids for end of sequence, end of turn and end of message, and those of texts that end an answer."""
    found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    found += [i for i, token in enumerate(metadata.get("tokenizer.ggml.tokens") or []) if token in _ENDS]
    ids = list(dict.fromkeys(i for i in found if i is not None))
    return ids if len(ids) > 1 else ids[0] if ids else None


def _rope_scaling(
    path: Path, metadata: dict[str, Any], architecture: str, config: dict[str, Any], tensors: list[Any]
) -> dict[str, Any] | None:
    factors = next((t.data for t in tensors if t.name == ROPE_FACTORS), None)
    if factors is not None:
        return _llama3_scaling(path, np.asarray(factors, dtype=np.float64), config)
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.get(f"{prefix}type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{path.name}: rope scaling {kind!r}; supported in GGUF are linear, yarn and Llama 3's factors"
        )
    factor = metadata.get(f"{prefix}factor", 1.0)
    scaling = {"rope_type": kind, "factor": factor}
    if architecture == "gpt-oss":
        scaling["truncate"] = False  # as in the published configuration; the file does not say so
    if original := metadata.get(f"{prefix}original_context_length"):
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if (value := metadata.get(f"{prefix}yarn_{name}")) is not None:
            scaling[name] = value
    if kind == "yarn" and (attention := metadata.get(f"{prefix}attn_factor", 1.0)) != 1.0:
        # llama.cpp multiplies YaRN's own temperature by this.
        scaling["attention_factor"] = attention * (1 + 0.1 * math.log(max(factor, 1.0)))
    return scaling


def _llama3_scaling(path: Path, factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's `rope_scaling` from the divisor of each frequency. Raises ModelError if the constants differ."""
    low, high, original, factor = 1.0, 4.0, 8192, float(factors.max())
    wavelength = 2 * np.pi * config["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ModelError(f"{path.name}: rope_freqs.weight does not follow Llama 3's scaling; no other is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _write_tokenizer(path: Path, metadata: dict[str, Any], work: Path) -> None:
    from runtime.models.gguf_tokenizer import build_tokenizer

    fast, settings = build_tokenizer(path, metadata)
    # The library's own `save` raises no OSError when the disk is full.
    (work / "tokenizer.json").write_text(fast.to_str(pretty=True), encoding="utf-8")
    _write_json(work / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
