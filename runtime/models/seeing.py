"""Models that see: their configurations describe a vision tower beside a decoder, which `DecoderSpec` reads alone."""

import json
from pathlib import Path
from typing import Any

from runtime.errors import ModelError
from runtime.models.config_json import Unsupported, architecture_of, read_json
from runtime.models.families import SEEING

_FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "gemma3_text": "Gemma3",
    "qwen2": "Qwen2",
    "qwen2_5_vl": "Qwen2",  # older files, which have the fields of the decoder beside those of the tower
    "qwen2_5_vl_text": "Qwen2",
    "qwen3_vl_text": "Qwen3",
    "qwen3_5_text": "Qwen3_5",
}
# Published numbers of pairs of dimensions that positions in time, height and width rotate.
_SECTIONS = {
    "Qwen2_5_VLForConditionalGeneration": (16, 24, 24),
    "Qwen3VLForConditionalGeneration": (24, 20, 20),
    "Qwen3_5ForConditionalGeneration": (11, 11, 10),
}
# Published values of fields that the files of Gemma 3 leave out.
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
# The same, of LLaVA-OneVision.
_QWEN2 = {"vocab_size": 151936, "max_position_embeddings": 32768}


def as_decoder(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The configuration of the decoder of a model that sees. Raises KeyError or Unsupported."""
    text: Any = (
        config if config.get("model_type") == "qwen2_5_vl" and "text_config" not in config else config["text_config"]
    )
    if (family := _FAMILIES.get(kind := text.get("model_type"))) is None:
        raise Unsupported(f"the decoder of {architecture} is of type {kind!r}; supported are {', '.join(_FAMILIES)}")
    # These fields of the whole model count for its decoder, too.
    names = SEEING[architecture]
    is_tied = text.get("tie_word_embeddings", names.tied)
    # Files of some from before transformers 5 have it in the text's section, beside a false of the whole.
    ties = config.get("tie_word_embeddings", is_tied) or (names.tied_by_text and is_tied)
    outer = {"tie_word_embeddings": ties}
    outer |= {name: config[name] for name in ("quantization_config", "eos_token_id") if config.get(name) is not None}
    defaults = _GEMMA3 if family == "Gemma3" else _QWEN2 if family == "Qwen2" else {}
    return {**defaults, **text, **outer, "architectures": [f"{family}ForCausalLM"]}


def rope_axes(config: dict[str, Any], architecture: str, pairs: int) -> tuple[int, ...]:
    """`RopeSpec.axes` of a decoder's configuration; `pairs`: of dimensions that are rotated. Raises ModelError."""
    if (published := _SECTIONS.get(architecture)) is None:
        return ()
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sections = scaling.get("mrope_section", published)
    if len(sections) != 3 or sum(sections) != pairs:
        raise ModelError(f"config.json has mrope_section {sections}; it must be three numbers with the sum {pairs}")
    if architecture == "Qwen2_5_VLForConditionalGeneration":
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    # Pairs take turns, as long as their axis has any left; what is left at the end is of time.
    return tuple(i % 3 if i // 3 < sections[i % 3] else 0 for i in range(pairs))


def stored_prefix(name: str, architecture: str) -> str:
    """The name in the checkpoint of a tensor of the decoder."""
    names = SEEING[architecture]
    return names.model + name.removeprefix("model.") if name.startswith("model.") else names.head + name


def describe_sight(directory: Path) -> bytes:
    """What the KV of images depends on besides the weights and the decoder; empty: the model does not see.

    Raises ModelError.
    """
    config = read_json(directory / "config.json")
    if architecture_of(config) not in SEEING:
        return b""
    files = (directory / name for name in ("preprocessor_config.json", "processor_config.json"))
    others = [read_json(file) for file in files if file.exists()]
    return json.dumps([config | {"text_config": None}, *others], sort_keys=True).encode()
