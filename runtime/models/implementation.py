"""The choice between Ramet's own code, for the Llama family, and transformers' code."""

from pathlib import Path
from typing import Any

from runtime.config import ModelConfig
from runtime.errors import ModelError
from runtime.models.config_json import Unsupported, architecture_of, read_json
from runtime.models.quantization import read_quantization
from runtime.models.spec import DecoderSpec, is_packed

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"
# Sections of config.json that describe inputs other than text.
_SENSES = {"vision_config": "images", "audio_config": "sound", "speech_config": "sound"}


def own_spec(config: ModelConfig, directory: Path) -> DecoderSpec | None:
    """The spec of a model that Ramet's own code computes; None: transformers' code computes it (not imported here).

    Raises ModelError if neither code can compute the model, or if the code that `--model-impl` names cannot.
    """
    given = read_json(directory / "config.json")
    if config.model_impl != "transformers":
        try:
            return DecoderSpec.load(directory)
        except Unsupported:
            if config.model_impl == "ramet" or is_packed(given):
                raise
    check_served(given)
    return None


def context_of(config: ModelConfig, directory: Path) -> int:
    """The context length of a model. Raises ModelError."""
    if (spec := own_spec(config, directory)) is not None:
        return spec.context_length
    given = read_json(directory / "config.json")
    given = given["text_config"] if is_diffusion_gemma(given) else given
    if not isinstance(context := given.get("max_position_embeddings"), int):
        raise ModelError("config.json has no max_position_embeddings")
    return context


def is_diffusion_gemma(config: dict[str, Any]) -> bool:
    """Whether this is DiffusionGemma, the only diffusion model that transformers' code computes."""
    return DIFFUSION_GEMMA in (config.get("architectures") or [])[:1]


def check_served(config: dict[str, Any]) -> None:
    """Raise ModelError for a configuration that cannot be served with transformers' code either."""
    architecture = architecture_of(config)
    if is_diffusion_gemma(config):
        _check_diffusion_gemma(config)
    elif config.get("is_encoder_decoder"):
        raise ModelError(f"{architecture} is an encoder-decoder; supported are decoders")
    elif found := [kind for section, kind in _SENSES.items() if config.get(section)]:
        raise ModelError(f"{architecture} takes {found[0]}; supported is text alone")
    if (quantization := read_quantization(config)) is not None:
        raise ModelError(
            f"the checkpoint of {architecture} is quantised ({quantization.name}); transformers' code is served with "
            "float32, bfloat16 and float16 weights. Ramet's own code, which reads quantised ones, does not know the "
            "model or was not chosen"
        )


def _check_diffusion_gemma(config: dict[str, Any]) -> None:
    """Raise ModelError for unsupported variants of DiffusionGemma. Its section for images is ignored."""
    if not config.get("tie_word_embeddings", True):
        raise ModelError(f"{DIFFUSION_GEMMA} is served with the weights of its decoder tied to those of its encoder")
    if not isinstance(text := config.get("text_config"), dict):
        raise ModelError("config.json has no text_config")
    if text.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{DIFFUSION_GEMMA} is served where its encoder is causal")
