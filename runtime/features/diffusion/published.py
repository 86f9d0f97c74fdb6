"""Published diffusion models: mask tokens, and the settings that their authors recommend."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from runtime.errors import ModelError
from runtime.features.diffusion.ask import Algorithm, NoiseParams
from runtime.models.bidirectional import BIDIRECTIONAL, as_causal, block_size
from runtime.models.config_json import architecture_of, positive_size, read_generation, read_json, refusing
from runtime.models.implementation import is_diffusion_gemma

# DiffusionGemma's settings: names in generation_config.json, Ramet's names and transformers' defaults.
_NOISE = {
    "max_denoising_steps": ("steps", 48),
    "t_min": ("t_min", 0.4),
    "t_max": ("t_max", 0.8),
    "stability_threshold": ("stability_threshold", 1),
    "confidence_threshold": ("confidence_threshold", 0.005),
}
_SAMPLER = "EntropyBoundSamplerConfig"


@dataclass(frozen=True, slots=True)
class DiffusionSpec:
    """The properties of a diffusion model.

    Attributes:
        mask_token_id: the token of undecided positions; -1: no mask, canvases start with random tokens.
        logits_shift: the logits of token i are in row i - logits_shift.
        algorithm: the sampler of the model's authors.
        attended: size of the attention blocks, in which a position sees its own block and those before it (block
            diffusion); None: every position sees all positions.
        block: default number of positions that are denoised together.
        threshold: default confidence at which a mask is decided; None: a schedule decides.
        edits: whether requests may use `joint_threshold`, which replaces decided tokens.
        defaults: the model's defaults for other fields of `NoiseParams`.
    """

    mask_token_id: int
    logits_shift: int
    algorithm: Algorithm
    attended: int | None = None
    block: int = 32
    threshold: float | None = None
    edits: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)


_SDAR = DiffusionSpec(151669, 0, "low_confidence", block=4, threshold=0.85)
# Published block diffusion models. A configuration may override the mask token, and says the block of attention.
_BLOCKS = {
    "SDARForCausalLM": _SDAR,
    "SDARMoeForCausalLM": _SDAR,
    # Only LLaDA2.1 was trained to edit, but LLaDA2.0 has the same configuration.
    "LLaDA2MoeModelLM": DiffusionSpec(156895, 0, "low_confidence", block=32, threshold=0.95, edits=True),
    "Fast_dLLM_QwenForCausalLM": DiffusionSpec(151665, 1, "low_confidence", block=8, threshold=0.9),
}


def read_spec(directory: Path) -> DiffusionSpec | None:
    """The DiffusionSpec of a model directory; None for a causal model. Raises ModelError."""
    config = read_json(directory / "config.json")
    if is_diffusion_gemma(config):
        return canvas_spec(config, read_generation(directory))
    with refusing(directory / "config.json"):
        return diffusion_spec(config, architecture_of(config))


def diffusion_spec(config: dict[str, Any], architecture: str) -> DiffusionSpec | None:
    """The DiffusionSpec of a configuration; None for a causal model. Raises KeyError (missing key), ModelError."""
    if architecture not in BIDIRECTIONAL:
        return None
    config = as_causal(config, architecture)
    published = _BLOCKS.get(architecture)
    mask = config.get("mask_token_id", published.mask_token_id) if published else config["mask_token_id"]
    vocab = config["vocab_size"]
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < vocab:
        raise ModelError(f"config.json has mask_token_id {mask!r}; it must be one of the {vocab} tokens")
    if architecture == "LLaDAModelLM":
        return DiffusionSpec(mask, 0, "low_confidence")
    if architecture == "DreamModel":
        return DiffusionSpec(mask, 1, "entropy")
    if published is not None:
        attended = block_size(config, architecture) or 1
        block = attended if attended % published.block else published.block
        return replace(published, mask_token_id=mask, attended=attended, block=block)
    shift = config.get("logits_shift", 1)
    if shift not in (0, 1):
        raise ModelError(f"config.json has logits_shift {shift!r}; supported are 0 and 1")
    return DiffusionSpec(mask, shift, "low_confidence")


def canvas_spec(config: dict[str, Any], generation: dict[str, Any]) -> DiffusionSpec:
    """The spec of DiffusionGemma, from config.json and generation_config.json. Raises ModelError."""
    length = positive_size(config, "canvas_length", 256)
    context = config.get("text_config", {}).get("max_position_embeddings", length + 1)
    if length >= context:
        raise ModelError(f"config.json has canvas_length {length}; it leaves no room for a prompt in {context} tokens")
    given = {name: generation[name] for name in _NOISE if generation.get(name) is not None}
    defaults = {own: given.get(name, value) for name, (own, value) in _NOISE.items()}
    sampler = generation.get("sampler_config")
    sampler = {} if sampler is None else sampler
    if not isinstance(sampler, dict) or sampler.get("_cls_name", _SAMPLER) != _SAMPLER:
        raise ModelError(f"generation_config.json has sampler_config {sampler!r}; supported is an {_SAMPLER}")
    bound = sampler.get("entropy_bound")
    defaults["entropy_bound"] = 0.1 if bound is None else bound
    try:
        NoiseParams.model_validate(defaults, strict=True)
    except ValidationError as error:
        (own, *_), reason = error.errors()[0]["loc"], error.errors()[0]["msg"]
        name = next((name for name, (each, _) in _NOISE.items() if each == own), own)
        raise ModelError(f"generation_config.json has a {name} that cannot be used: {reason}") from None
    if defaults["t_min"] > defaults["t_max"]:
        raise ModelError(f"the model's t_min is {defaults['t_min']}, more than its t_max, {defaults['t_max']}")
    return DiffusionSpec(-1, 0, "entropy_bound", attended=1, block=length, defaults=defaults)
