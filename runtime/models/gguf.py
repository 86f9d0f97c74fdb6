"""GGUF files become Hugging Face directories: tensors dequantised, names and row order restored, tokenizer rebuilt."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import ModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHARD_BYTES = 4 << 30


def convert_gguf(path: Path, target: Path) -> Path:
    """Write the Hugging Face directory of a GGUF file; `target` appears only when it is whole.

    Tensors are stored as float32, so that what the file's quantisation means is kept to the last bit.

    Raises:
        ModelError: if the file is not a whole GGUF file of a supported architecture, or the disk is full.
    """
    metadata, tensors = _read(path)
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path.name}: architecture {architecture!r}; supported in GGUF are {', '.join(ARCHITECTURES)}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        config = _config(path, metadata, architecture, tensors)
        _write_json(work / "config.json", config)
        ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
        _write_json(work / "generation_config.json", ids)
        _write_tokenizer(path, metadata, work)
        _write_tensors(path, tensors, config, architecture, work)
        os.chmod(work, 0o755)
        try:
            os.rename(work, target)
        except OSError:
            if not (target / "config.json").exists():  # else another process was faster; its copy is as good
                raise
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        # Large arrays are decoded once here; the reader's own accessor is quadratic for a single element.
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except Exception as error:  # the reader has no error of its own: a cut file shows as almost anything
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from None


def _config(path: Path, metadata: dict[str, Any], architecture: str, tensors: list[Any]) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelError(f"{path.name} has no metadata field {architecture}.{name}")
        return value

    names = {tensor.name for tensor in tensors}
    heads, hidden = get("attention.head_count"), get("embedding_length")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens") or []),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    if architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    if scaling := _rope_scaling(path, metadata, architecture, config, tensors):
        config["rope_scaling"] = scaling
    return config


def _rope_scaling(
    path: Path, metadata: dict[str, Any], architecture: str, config: dict[str, Any], tensors: list[Any]
) -> dict[str, Any] | None:
    factors = next((t.data for t in tensors if t.name == "rope_freqs.weight"), None)
    if factors is not None:
        return _llama3_scaling(path, np.asarray(factors, dtype=np.float64), config)
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{path.name}: rope scaling {kind!r}; supported in GGUF are linear, yarn and Llama 3's factors"
        )
    scaling = {"rope_type": kind, "factor": metadata.get(f"{architecture}.rope.scaling.factor", 1.0)}
    if original := metadata.get(f"{architecture}.rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(path: Path, factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """GGUF keeps Llama 3's scaling as one divisor a frequency; all published models share these constants."""
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


def _write_tensors(path: Path, tensors: list[Any], config: dict[str, Any], architecture: str, work: Path) -> None:
    """Dequantise one tensor at a time into shards of a few GB."""
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from tqdm import tqdm

    shard: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}

    def save() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, work / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for tensor in tqdm(tensors, desc=f"converting {path.name}", unit="tensor", disable=None):
        if tensor.name == "rope_freqs.weight":
            continue
        try:
            data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except (NotImplementedError, KeyError):
            raise ModelError(
                f"{path.name}: {tensor.name} has quantisation {tensor.tensor_type.name}; it is not supported"
            ) from None
        except ValueError as error:
            raise ModelError(f"{path} is cut short at {tensor.name}: {error}") from None
        data = data.reshape([int(n) for n in reversed(tensor.shape)])
        if architecture == "llama" and ".attn_q." in tensor.name:
            data = _unpermute(data, config["num_attention_heads"])
        if architecture == "llama" and ".attn_k." in tensor.name:
            data = _unpermute(data, config["num_key_value_heads"])
        shard[_tensor_name(path, tensor.name)] = np.ascontiguousarray(data)
        if sum(array.nbytes for array in shard.values()) >= _SHARD_BYTES:
            save()
    if shard:
        save()
    _write_json(work / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _tensor_name(path: Path, name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    if parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    raise ModelError(f"{path.name} has a tensor {name}, which no supported model has")


def _unpermute(data: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores q and k rows for interleaved rotation; Hugging Face rotates halves."""
    rows = len(data)
    return data.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)


def _write_tokenizer(path: Path, metadata: dict[str, Any], work: Path) -> None:
    from runtime.models.gguf_tokenizer import build_tokenizer

    fast, settings = build_tokenizer(path, metadata)
    fast.save(str(work / "tokenizer.json"))
    _write_json(work / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
