"""Sampling, denoising and reuse parameters of a request, for HTTP, the offline engine and the engine process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from runtime.errors import InvalidRequest

Algorithm = Literal[
    "low_confidence", "joint_threshold", "entropy", "maskgit_plus", "topk_margin", "origin", "entropy_bound"
]
DocumentMethod = Literal["none", "a3", "cacheblend", "prophetkv", "legolink", "pie", "full", "random"]

# Fields of `SamplingParams` that constrain the output; they exclude each other.
CONSTRAINTS = ("json_schema", "regex", "grammar")

# Below this temperature the most likely token is certain.
_LEAST_TEMPERATURE = 1e-4

StopString = Annotated[str, Field(min_length=1, max_length=1024)]

# Options of `ReuseParams` that not all methods take.
TAKEN_BY = {
    "ratio": ("a3", "cacheblend", "prophetkv", "legolink", "random"),
    **{"k": ("legolink",), "variant": ("full",), "max_kl": ("auto",)},
}

# LLaDA's block length, the default if it divides the length.
_BLOCK = 32
# Fields of guidance, Fast-dLLM's caches and BiCache.
_OF_PREFIXES = (
    *("cfg_scale", "cache", "reuse", "partial", "prefix_tokens", "depth", "refresh_interval"),
    *("depth_bound", "refresh", "drift_threshold"),
)
# Algorithms whose confidence is a probability, as `threshold` and `factor` require.
_BY_PROBABILITY = ("low_confidence", "joint_threshold", "maskgit_plus")
# LLaDA2.1's joint threshold as its authors recommend it for quality.
_JOINT = {"threshold": 0.7, "edit_threshold": 0.5, "max_post_edit_steps": 16}
# Tokens of a diffusion model's answer that nobody limits: it costs all of them from the first step on.
UNASKED = 128
# Fields of canvases of noise, and those that they share with canvases of masks.
_OF_NOISE = ("entropy_bound", "t_min", "t_max", "stability_threshold", "confidence_threshold")
_OF_ALL = ("gen_length", "steps", "block_length", "algorithm", "stream_canvas")


class Lazy(BaseModel):
    """Where a grammar holds, if not for the whole output. It describes triggers as well."""

    model_config = ConfigDict(extra="forbid")

    triggers: list[StopString] = Field(
        min_length=1, max_length=512, description="texts from which the output follows the grammar up to its end"
    )
    at_start: bool = Field(
        False, description="only from the output's first text on, to the output's end; white space does not count"
    )


class SamplingParams(BaseModel):
    """Sampling parameters, with SGLang's names and defaults."""

    model_config = ConfigDict(extra="forbid", strict=False)

    max_new_tokens: int | None = Field(
        128, ge=0, le=1 << 20, description="most tokens to generate; null: as many as the context holds"
    )
    min_new_tokens: int = Field(
        0, ge=0, le=1 << 20, description="least tokens before an end of sequence or a stop string"
    )
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, le=1 << 20, description="-1 or 0: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    typical_p: float = Field(1.0, gt=0, le=1, description="share of the tokens whose surprise is nearest to the mean")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="counts output tokens")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="counts output tokens")
    repetition_penalty: float = Field(1.0, ge=0.01, le=2, description="applies to prompt and output tokens")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="the same seed and request give the same tokens")
    stop: list[StopString] = Field(default_factory=list, max_length=16, description="strings that end the generation")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=64, description="completions of the prompt")
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    json_schema: str | None = Field(
        None, min_length=2, max_length=1 << 16, description="JSON schema, as text, for the output"
    )
    regex: str | None = Field(
        None, min_length=1, max_length=1 << 13, description="regular expression for the whole output"
    )
    grammar: str | None = Field(
        None, min_length=1, max_length=1 << 16, description="EBNF (GBNF) or Lark grammar for the whole output"
    )
    lazy: Lazy | None = Field(None, description="the grammar, schema or expression holds for parts of the output alone")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    no_stop_trim: bool = Field(False, description="keep the stop string in the text")

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        if value is None or value == "":
            return []
        return [value] if isinstance(value, str | int) else value

    @property
    def constrained(self) -> bool:
        """Whether the output follows a grammar."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @property
    def constraint(self) -> str | None:
        """The field that constrains the output, if one does."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @cached_property
    def takes_best(self) -> bool:
        """Whether every token is the one with the highest logit, as the model has it."""
        changed = bool(self.logit_bias) or self.penalised or self.min_new_tokens > 0 or self.constrained
        return self.greedy and not changed

    @property
    def penalised(self) -> bool:
        """Whether tokens count that were there before."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def divisor(self) -> float:
        """The divisor of the logits: the temperature, but large enough for quotients in float32."""
        return max(self.temperature, _LEAST_TEMPERATURE)

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a value does not fit the model or another value."""
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"{given[0]} and {given[1]} exclude each other", param=given[1])
        if self.lazy is not None and not given:
            raise InvalidRequest("lazy needs a grammar, a schema or an expression", param="lazy")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}",
                param="min_new_tokens",
            )
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if bad := next((i for i in ids if not 0 <= i < vocab_size), None):
                raise InvalidRequest(f"token id {bad} is out of range: the model has {vocab_size} tokens", param=name)


class Denoised(Protocol):
    """Defaults of a diffusion model, see `runtime.models.diffusion.DiffusionSpec`."""

    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def attended(self) -> int | None: ...
    @property
    def block(self) -> int: ...
    @property
    def threshold(self) -> float | None: ...
    @property
    def edits(self) -> bool: ...
    @property
    def defaults(self) -> Mapping[str, float]: ...


class DiffusionParams(BaseModel):
    """Denoising parameters, with the names of LLaDA, Dream, Fast-dLLM and DiffusionGemma.

    Absent ones have the model's default.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    gen_length: int | None = Field(None, ge=1, le=1 << 16, description="positions to denoise; default: max_new_tokens")
    steps: int | None = Field(
        None, ge=1, le=1 << 16, description="steps over all blocks; of block diffusion models: of each block"
    )
    block_length: int | None = Field(
        None, ge=1, le=1 << 16, description="blocks are denoised from left to right; default: 32, or as the model has"
    )
    algorithm: Algorithm | None = Field(
        None, description="sampler that chooses the masks to decide; default: that of the model's authors"
    )
    eps: float = Field(1e-3, gt=0, lt=1, description="end of the time in Dream's schedule")
    alg_temp: float = Field(0.0, ge=0, le=100, description="0: decide the most confident positions; above: sample them")
    cfg_scale: float = Field(
        0.0, ge=0, le=100, description="scale of classifier-free guidance, which takes a second pass"
    )
    threshold: float | None = Field(None, gt=0, le=1, description="decide every mask of at least this confidence (0.9)")
    factor: float | None = Field(
        None, gt=0, le=100, description="decide the n-th mask if its confidence >= 1 - factor/(n+1)"
    )
    edit_threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="joint_threshold: replace a decided token by one of more confidence than this (0.5)",
    )
    max_post_edit_steps: int | None = Field(
        None, ge=0, le=1024, description="joint_threshold: most steps on a block without masks (16)"
    )
    cache: Literal["none", "prefix", "dual"] = Field("none", description="Fast-dLLM's caches within the request")
    reuse: bool | None = Field(None, description="share the prefix's shallow layers; default: --bicache")
    partial: bool | None = Field(None, description="share the beginning of a longer encoding; default: as the server")
    prefix_tokens: int | None = Field(None, ge=0, description="leading prompt tokens that requests share")
    depth: int | None = Field(None, ge=0, description="layers in which the shared prefix is reused; default: by table")
    refresh_interval: int | None = Field(
        None, ge=1, description="steps between refreshes of the prefix's deep layers; 1 and depth 1 are exact"
    )
    depth_bound: float | None = Field(
        None, ge=0, le=1e4, description="nats by which outputs may diverge; default: --depth-bound"
    )
    refresh: Literal["interval", "drift"] = Field(
        "interval", description="drift: refresh when the prompt's rows behind the prefix have moved too far"
    )
    drift_threshold: float = Field(0.1, gt=0, description="distance over the norm, of keys and values, for `drift`")
    entropy_bound: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="entropy_bound: accept tokens while the entropies of others add up to this (0.1)",
    )
    t_min: float | None = Field(None, ge=0, le=100, description="entropy_bound: temperature to which steps fall (0.4)")
    t_max: float | None = Field(None, gt=0, le=100, description="entropy_bound: temperature from which they fall (0.8)")
    stability_threshold: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="entropy_bound: end a canvas that did not change in so many steps (1), if it is",
    )
    confidence_threshold: float | None = Field(
        None, ge=0, le=100, description="below this mean entropy as well (0.005); 0: all steps are done"
    )
    stream_canvas: bool = Field(False, description="report all positions at every step, decided or masked")

    def filled(self, model: Denoised, sampling: SamplingParams) -> DiffusionParams:
        """A copy with the defaults of the model and the request filled in."""
        alg = self.algorithm or model.algorithm
        length = self.gen_length or sampling.max_new_tokens or UNASKED
        if model.algorithm == "entropy_bound":
            own = {**model.defaults, "algorithm": alg, "block_length": model.block, "gen_length": length}
            return self.model_copy(update={name: own[name] for name in own if getattr(self, name) is None})
        if model.attended is not None:
            return self._filled_by_block(model, alg, length)
        blocks = self.cache != "none" or alg == "low_confidence"
        block = self.block_length or (_BLOCK if blocks and length % _BLOCK == 0 else length)
        filled = {"algorithm": alg, "gen_length": length, "block_length": block, "steps": self.steps or length}
        return self.model_copy(update=filled)

    def _filled_by_block(self, model: Denoised, algorithm: Algorithm, length: int) -> DiffusionParams:
        """Where the number of steps is said, they decide; else the model's threshold does."""
        block = self.block_length or model.block
        scheduled = self.steps is not None or self.factor is not None or algorithm not in _BY_PROBABILITY
        filled: dict[str, Any] = {"algorithm": algorithm, "gen_length": length, "block_length": block}
        filled["steps"] = self.steps or block
        defaults = _JOINT if algorithm == "joint_threshold" else {} if scheduled else {"threshold": model.threshold}
        filled |= {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return self.model_copy(update=filled)

    def check(self, model: Denoised, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        """Raise InvalidRequest if the filled values do not fit each other, the model or the prompt."""
        assert self.gen_length
        assert self.block_length
        assert self.steps
        if model.algorithm == "entropy_bound":
            self._check_noise(model)
        else:
            self._check_masks(model, num_layers, prompt_tokens)
        _refuse_sampling(sampling)

    def _check_noise(self, model: Denoised) -> None:
        """Raise InvalidRequest for what a model whose canvases begin as noise has no use for."""
        default = DiffusionParams()
        for name in type(self).model_fields:
            if name not in (*_OF_NOISE, *_OF_ALL) and getattr(self, name) != getattr(default, name):
                _refuse(f"{name} is not for models whose canvases begin as noise", name)
        for name, own in (("algorithm", model.algorithm), ("block_length", model.block)):
            if (asked := getattr(self, name)) != own:
                _refuse(f"{name} is {asked}; the model's is {own}", name)
        if (self.t_min or 0.0) > (self.t_max or 0.0):
            _refuse(f"t_min is {self.t_min}, more than t_max, {self.t_max}", "t_min")

    def _check_masks(self, model: Denoised, num_layers: int, prompt_tokens: int) -> None:
        """Raise InvalidRequest for values that do not fit each other or a model whose canvases begin as masks."""
        assert self.gen_length
        assert self.block_length
        assert self.steps
        if name := next((name for name in _OF_NOISE if getattr(self, name) is not None), None):
            _refuse(f"{name} is for models whose canvases begin as noise (DiffusionGemma)", name)
        if self.algorithm == "entropy_bound":
            _refuse("algorithm entropy_bound is for models whose canvases begin as noise (DiffusionGemma)", "algorithm")
        if model.attended is None:
            blocks, rest = divmod(self.gen_length, self.block_length)
            if rest:
                message = f"gen_length {self.gen_length} is no multiple of block_length {self.block_length}"
                _refuse(message, "block_length")
            if self.steps % blocks:
                _refuse(f"steps {self.steps} cannot be divided among {blocks} blocks", "steps")
        else:
            self._check_blocks(model.attended)
        self._check_edits(model)
        if self.threshold is not None and self.factor is not None:
            _refuse("threshold and factor exclude each other", "factor")
        for name in ("threshold", "factor"):
            if getattr(self, name) is not None and self.algorithm not in _BY_PROBABILITY:
                _refuse(f"{name} needs algorithm {' or '.join(_BY_PROBABILITY)}, not {self.algorithm}", name)
        if self.depth is not None and self.depth > num_layers:
            _refuse(f"depth is {self.depth}; the model has {num_layers} layers", "depth")
        if self.prefix_tokens is not None and self.prefix_tokens > prompt_tokens:
            _refuse(f"prefix_tokens is {self.prefix_tokens}; the prompt has {prompt_tokens} tokens", "prefix_tokens")

    def _check_edits(self, model: Denoised) -> None:
        """Raise InvalidRequest for tokens that are to be edited by a model or an algorithm that does not edit."""
        if self.algorithm != "joint_threshold":
            for name in ("edit_threshold", "max_post_edit_steps"):
                if getattr(self, name) is not None:
                    _refuse(f"{name} needs algorithm joint_threshold, not {self.algorithm}", name)
        elif not model.edits:
            _refuse("algorithm joint_threshold is for models that edit decided tokens (LLaDA2.1)", "algorithm")
        elif self.block_length != model.attended:
            _refuse(f"algorithm joint_threshold edits whole blocks of {model.attended} positions", "block_length")
        elif self.steps != self.block_length:
            _refuse("algorithm joint_threshold has no schedule of steps", "steps")

    def _check_blocks(self, attended: int) -> None:
        """Raise InvalidRequest for what a block diffusion model has no use for."""
        default = DiffusionParams()
        for name in _OF_PREFIXES:
            if getattr(self, name) != getattr(default, name):
                _refuse(f"{name} is not for block diffusion models, whose prefixes are shared as they are", name)
        if attended % (self.block_length or 1):
            _refuse(
                f"block_length {self.block_length} does not divide the model's blocks of {attended}", "block_length"
            )


class ReuseParams(BaseModel):
    """Reuse of the KV of a prompt's documents, wherever they stand, with a few of their rows computed anew."""

    model_config = ConfigDict(extra="forbid", strict=False)

    method: Literal[DocumentMethod, "auto"] = Field(
        description="selects the rows; none: an ordinary prompt; auto: by the model's table, within max_kl"
    )
    ratio: float | None = Field(
        None, ge=0, le=1, description="share of the documents' rows that are computed anew; default: 0.15"
    )
    granularity: Literal["page", "token"] = Field("page", description="rows are selected one by one, or by whole pages")
    chunk_tokens: int = Field(512, ge=16, le=4096, description="documents are encoded in chunks of so many tokens")
    k: int | None = Field(None, ge=0, le=512, description="legolink: first rows of each chunk; default: 16")
    variant: Literal["cat", "local"] | None = Field(
        None, description="full: whether keys move to their place in the prompt (cat, the default)"
    )
    keep_tokens: int | None = Field(
        None, ge=64, le=1 << 20, description="rows of the documents that stay after the first token (SnapKV)"
    )
    max_kl: float | None = Field(None, ge=0, le=100, description="auto: largest mean KL to full prefill, in nats")

    def check(self) -> None:
        """Raise InvalidRequest if an option does not go with the method."""
        for name, methods in TAKEN_BY.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise InvalidRequest(f"{name} is an option of {', '.join(methods)}", param=f"reuse.{name}")
        if self.method == "none" and self.keep_tokens is not None:
            raise InvalidRequest("the method none keeps all tokens", param="reuse.keep_tokens")
        if self.method == "auto" and self.max_kl is None:
            raise InvalidRequest("the method auto needs max_kl", param="reuse.max_kl")
        if self.k is not None and self.ratio is not None:
            raise InvalidRequest("k and ratio exclude each other", param="reuse.k")


class ReasoningParams(BaseModel):
    """Sharing of the KV of reasoning steps that repeat within an output (ReasonCache)."""

    model_config = ConfigDict(extra="forbid", strict=False)

    method: Literal["reasoncache"] = "reasoncache"
    percentile: float = Field(
        80, gt=0, le=100, description="pages are shared whose distance is among so many percent of the latest ones"
    )
    tau_max: float = Field(0.9, ge=0, le=1, description="similarity that a step must exceed where others are unlike it")
    tau_min: float = Field(0.6, ge=0, le=1, description="likewise, where all others are like it")
    rotation: Literal["stale", "moved"] = Field(
        "stale", description="keys are read with the positions that they have (stale), or moved to their place"
    )
    across: bool = Field(False, description="steps are also compared with those of the tenant's other such requests")

    def check(self) -> None:
        """Raise InvalidRequest if the values do not fit each other."""
        if self.tau_min > self.tau_max:
            raise InvalidRequest(f"tau_min is {self.tau_min}, more than tau_max, {self.tau_max}", param="reuse.tau_min")


AnyReuse = ReuseParams | ReasoningParams
# For answers that have no place to say what was approximate.
EXACT = ReuseParams(method="none")


def _refuse_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for sampling parameters that diffusion models do not support."""
    default = SamplingParams()
    if sampling.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens must be at least 1 for diffusion models", param="max_new_tokens")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    for name in ("min_p", "typical_p", "min_new_tokens", *CONSTRAINTS, *penalties):
        if getattr(sampling, name) != getattr(default, name):
            raise InvalidRequest(f"{name} is not supported for diffusion models", param=name)


def _refuse(message: str, name: str) -> None:
    raise InvalidRequest(message, param=f"diffusion.{name}")
