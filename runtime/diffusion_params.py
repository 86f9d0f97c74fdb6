"""How a request wants a diffusion model to denoise: one definition for HTTP, the offline engine and the process."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from runtime.errors import InvalidRequest
from runtime.models.diffusion import Algorithm
from runtime.sampling_params import SamplingParams

# LLaDA's own block length, taken where it divides the length.
_BLOCK = 32
# Algorithms whose confidence is the probability of the chosen token, which is what a threshold compares.
_BY_PROBABILITY = ("low_confidence", "maskgit_plus")


class DiffusionParams(BaseModel):
    """Denoising parameters, with LLaDA's, Dream's and Fast-dLLM's names. What is left out has the model's default."""

    model_config = ConfigDict(extra="forbid", strict=False)

    gen_length: int | None = Field(None, ge=1, le=1 << 16, description="masks to denoise; default: max_new_tokens")
    steps: int | None = Field(None, ge=1, le=1 << 16, description="steps over all blocks; default: gen_length")
    block_length: int | None = Field(
        None, ge=1, le=1 << 16, description="blocks are denoised from left to right; default: 32 for low_confidence"
    )
    algorithm: Algorithm | None = Field(None, description="which masks are decided; default: as the model's authors")
    eps: float = Field(1e-3, gt=0, lt=1, description="where the time of Dream's schedule ends")
    alg_temp: float = Field(0.0, ge=0, le=100, description="0 decides the most confident; above, positions are drawn")
    cfg_scale: float = Field(0.0, ge=0, le=100, description="classifier-free guidance, by a second pass")
    threshold: float | None = Field(None, gt=0, le=1, description="decide every mask at least that confident (0.9)")
    factor: float | None = Field(None, gt=0, le=100, description="decide the n-th if confidence >= 1 - factor/(n+1)")
    cache: Literal["none", "prefix", "dual"] = Field("none", description="Fast-dLLM's caches within a request")
    reuse: bool | None = Field(None, description="share the prefix's shallow layers; default: --bicache")
    partial: bool | None = Field(None, description="share the beginning of a longer encoding; default: as the server")
    prefix_tokens: int | None = Field(None, ge=0, description="leading prompt tokens that requests share")
    depth: int | None = Field(None, ge=0, description="layers in which the shared prefix is reused; default: by table")
    refresh_interval: int | None = Field(None, ge=1, description="steps between refreshes of the prefix's deep layers")
    stream_canvas: bool = Field(False, description="report all positions at every step, decided or not")

    def filled(self, algorithm: Algorithm, sampling: SamplingParams) -> DiffusionParams:
        """With the defaults of a model (`algorithm`) and a request filled in."""
        alg = self.algorithm or algorithm
        length = self.gen_length or sampling.max_new_tokens or 128
        blocks = self.cache != "none" or alg == "low_confidence"
        block = self.block_length or (_BLOCK if blocks and length % _BLOCK == 0 else length)
        filled = {"algorithm": alg, "gen_length": length, "block_length": block, "steps": self.steps or length}
        return self.model_copy(update=filled)

    def check(self, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        """Raise InvalidRequest where filled values do not fit each other, the model or the prompt."""
        assert self.gen_length
        assert self.block_length
        assert self.steps
        blocks, rest = divmod(self.gen_length, self.block_length)
        if rest:
            _refuse(f"gen_length {self.gen_length} is no multiple of block_length {self.block_length}", "block_length")
        if self.steps % blocks:
            _refuse(f"steps {self.steps} cannot be divided among {blocks} blocks", "steps")
        if self.threshold is not None and self.factor is not None:
            _refuse("threshold and factor exclude each other", "factor")
        for name in ("threshold", "factor"):
            if getattr(self, name) is not None and self.algorithm not in _BY_PROBABILITY:
                _refuse(f"{name} needs algorithm {' or '.join(_BY_PROBABILITY)}, not {self.algorithm}", name)
        if self.depth is not None and self.depth > num_layers:
            _refuse(f"depth is {self.depth}; the model has {num_layers} layers", "depth")
        if self.prefix_tokens is not None and self.prefix_tokens > prompt_tokens:
            _refuse(f"prefix_tokens is {self.prefix_tokens}; the prompt has {prompt_tokens} tokens", "prefix_tokens")
        _refuse_sampling(sampling)


def _refuse_sampling(sampling: SamplingParams) -> None:
    """What the samplers of diffusion models do not know."""
    default = SamplingParams()
    if sampling.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens must be at least 1 for diffusion models", param="max_new_tokens")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    for name in ("min_p", "min_new_tokens", "json_schema", "regex", *penalties):
        if getattr(sampling, name) != getattr(default, name):
            raise InvalidRequest(f"{name} is not supported for diffusion models", param=name)


def _refuse(message: str, name: str) -> None:
    raise InvalidRequest(message, param=f"diffusion.{name}")
