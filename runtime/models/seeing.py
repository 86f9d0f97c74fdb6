"""Models that see: their configurations describe a vision tower beside a decoder, which `LlamaSpec` reads alone."""

from typing import Any

from runtime.models.config_json import Unsupported

# Architectures, and the prefix that the decoder's tensors have in the checkpoint in place of `model.`.
SEEING = {
    "Idefics3ForConditionalGeneration": "model.text_model.",
    "SmolVLMForConditionalGeneration": "model.text_model.",
}
_FAMILIES = {"llama": "Llama"}


def as_decoder(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """The configuration of a model's decoder, or of a model that has no tower. Raises KeyError or Unsupported."""
    if architecture not in SEEING:
        return config
    text = config["text_config"]
    if (family := _FAMILIES.get(kind := text.get("model_type"))) is None:
        raise Unsupported(f"the decoder of {architecture} is of type {kind!r}; supported are {', '.join(_FAMILIES)}")
    # These fields of the whole model count for its decoder, too.
    outer = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    outer |= {name: config[name] for name in ("quantization_config",) if name in config}
    return {**text, **outer, "architectures": [f"{family}ForCausalLM"]}


def stored_prefix(name: str, architecture: str) -> str:
    """The name in the checkpoint of a tensor of the decoder."""
    return SEEING[architecture] + name.removeprefix("model.") if name.startswith("model.") else name
