"""What requests ask of diffusion models, by the kind of the model, and what these report."""

from collections.abc import Mapping
from typing import ClassVar, Literal, NoReturn, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from runtime.errors import InvalidRequest
from runtime.params import CONSTRAINTS, SamplingParams
from runtime.report import Report

# Why a diffusion model's request shares no prefix: reuse is off, no prefix is known, it fills no page, the pool has no
# room for it, or it would be reused in no layer.
Unshared = Literal["off", "no_prefix", "too_short", "no_room", "no_layer"]
Algorithm = Literal[
    "low_confidence", "joint_threshold", "entropy", "maskgit_plus", "topk_margin", "origin", "entropy_bound"
]
# Output length of a request without a limit. A diffusion model computes the whole output in every step.
DEFAULT_LENGTH = 128

_MASKED: tuple[Algorithm, ...] = ("low_confidence", "entropy", "maskgit_plus", "topk_margin", "origin")
# Algorithms whose confidence is a probability, as `threshold` and `factor` require.
_BY_PROBABILITY = ("low_confidence", "joint_threshold", "maskgit_plus")
# LLaDA's block length, the default if it divides the length.
_LLADA_BLOCK = 32
# LLaDA2.1's joint threshold as its authors recommend it for quality.
_JOINT = {"threshold": 0.7, "edit_threshold": 0.5, "max_post_edit_steps": 16}


class DenoisingReport(Report, tag="denoising"):
    """The number of denoising steps of a diffusion model so far."""

    inline = True
    denoise_steps: int


class SharedPrefixReport(Report, tag="bicache", kw_only=True):
    """How a diffusion model's request shares a prefix whose KV is reused in the lower layers.

    Attributes:
        shallow_depth: number of layers in which the prefix is reused.
        encoded_tokens: length of the prefix, in whole pages.
        unshared: why none is shared; None: the request was not admitted. Absent if one is shared.
        refreshes: number of denoising steps that refreshed the prefix's other layers.
        prefix_ratio: the prefix's share of the request's positions.
        denoise_steps: number of denoising steps so far.
        divergence_bound: largest divergence in nats of a measured depth; absent if depths are not measured.
        refresh_interval: denoising steps between two refreshes; absent with `divergence_bound`.
        depth_divergence: measured divergence of the depth in nats; None: not measured; absent with `divergence_bound`.
    """

    inline = True
    shallow_depth: int
    encoded_tokens: int
    unshared: Unshared | UnsetType | None = UNSET
    refreshes: int
    prefix_ratio: float
    denoise_steps: int
    divergence_bound: float | UnsetType = UNSET
    refresh_interval: int | UnsetType = UNSET
    depth_divergence: float | UnsetType | None = UNSET


class DiffusionInfo(msgspec.Struct):
    """Settings of a diffusion model.

    Attributes:
        mask_token_id: the token at undecided positions; -1: there is none.
        algorithm: its default sampler.
        num_layers: largest number of layers that can be reused.
        depth_table: name of the table of reuse depths.
        refresh_interval: steps between refreshes of a prefix's other layers, unless a request says otherwise.
        attended, block, threshold, edits, defaults: see `runtime.features.diffusion.published.DiffusionSpec`.
        depth_bound: default bound in nats on the divergence of measured depths; None: no depth is measured.
    """

    mask_token_id: int
    algorithm: Algorithm
    num_layers: int
    depth_table: str
    refresh_interval: int
    attended: int | None = None
    block: int = 32
    threshold: float | None = None
    edits: bool = False
    depth_bound: float | None = None
    defaults: dict[str, int | float] = {}


class Denoised(Protocol):
    """Defaults of a diffusion model, see `runtime.features.diffusion.published.DiffusionSpec`."""

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


class DenoisingParams(BaseModel):
    """Parameters of all kinds of models. An absent parameter has the model's default.

    Attributes:
        models: name of the kind in errors.
        algorithms: the kind's samplers.
    """

    model_config = ConfigDict(extra="forbid", strict=False)
    models: ClassVar[str]
    algorithms: ClassVar[tuple[Algorithm, ...]]

    gen_length: int | None = Field(None, ge=1, le=1 << 16, description="positions to denoise; default: max_new_tokens")
    steps: int | None = Field(
        None, ge=1, le=1 << 16, description="steps over all blocks; of block diffusion models: of each block"
    )
    block_length: int | None = Field(
        None, ge=1, le=1 << 16, description="blocks are denoised from left to right; default: 32, or the model's"
    )
    algorithm: Algorithm | None = Field(
        None, description="sampler that chooses the masks to decide; default: that of the model's authors"
    )
    stream_canvas: bool = Field(False, description="report all positions at every step, decided or masked")

    def defaults(self, model: Denoised, length: int) -> dict[str, object]:
        """Values for absent parameters; `length`: number of positions to denoise."""
        raise NotImplementedError

    def check(self, model: Denoised, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        """Raise InvalidRequest if the filled values do not fit each other, the model or the prompt."""
        _refuse_sampling(sampling)


class MaskParams(DenoisingParams):
    """Parameters of models whose canvases begin as masks."""

    eps: float = Field(1e-3, gt=0, lt=1, description="end of the time in Dream's schedule")
    alg_temp: float = Field(0.0, ge=0, le=100, description="0: decide the most confident positions; above: sample them")
    threshold: float | None = Field(None, gt=0, le=1, description="decide every mask of at least this confidence (0.9)")
    factor: float | None = Field(
        None, gt=0, le=100, description="decide the n-th mask if its confidence >= 1 - factor/(n+1)"
    )

    def check(self, model: Denoised, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        super().check(model, sampling, num_layers, prompt_tokens)
        if self.threshold is not None and self.factor is not None:
            _refuse("threshold and factor exclude each other", "factor")
        for name in ("threshold", "factor"):
            if getattr(self, name) is not None and self.algorithm not in _BY_PROBABILITY:
                _refuse(f"{name} needs algorithm {' or '.join(_BY_PROBABILITY)}, not {self.algorithm}", name)


class BidirectionalParams(MaskParams):
    """Parameters of LLaDA and Dream, whose positions all attend to each other: also Fast-dLLM's and BiCache's."""

    models: ClassVar[str] = "bidirectional diffusion models (LLaDA, Dream)"
    algorithms: ClassVar[tuple[Algorithm, ...]] = _MASKED

    cfg_scale: float = Field(
        0.0, ge=0, le=100, description="scale of classifier-free guidance, which takes a second pass"
    )
    cache: Literal["none", "prefix", "dual"] = Field("none", description="Fast-dLLM's caches within the request")
    reuse: bool | None = Field(None, description="share the prefix's shallow layers; default: unless --reuse is none")
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

    def defaults(self, model: Denoised, length: int) -> dict[str, object]:
        algorithm = self.algorithm or model.algorithm
        in_blocks = (self.cache != "none" or algorithm == "low_confidence") and length % _LLADA_BLOCK == 0
        block = _LLADA_BLOCK if in_blocks else length
        return {"algorithm": algorithm, "block_length": block, "steps": length}

    def check(self, model: Denoised, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        assert self.gen_length
        assert self.block_length
        assert self.steps
        blocks, rest = divmod(self.gen_length, self.block_length)
        if rest:
            _refuse(f"gen_length {self.gen_length} is no multiple of block_length {self.block_length}", "block_length")
        if self.steps % blocks:
            _refuse(f"steps {self.steps} cannot be divided among {blocks} blocks", "steps")
        if self.depth is not None and self.depth > num_layers:
            _refuse(f"depth is {self.depth}; the model has {num_layers} layers", "depth")
        if self.prefix_tokens is not None and self.prefix_tokens > prompt_tokens:
            _refuse(f"prefix_tokens is {self.prefix_tokens}; the prompt has {prompt_tokens} tokens", "prefix_tokens")
        super().check(model, sampling, num_layers, prompt_tokens)


class BlockParams(MaskParams):
    """Parameters of block diffusion models, which attend to whole blocks and all before them."""

    models: ClassVar[str] = "block diffusion models (LLaDA2, SDAR, Fast-dLLM v2)"
    algorithms: ClassVar[tuple[Algorithm, ...]] = (*_MASKED, "joint_threshold")

    edit_threshold: float | None = Field(
        None, ge=0, le=1, description="joint_threshold: replace a decided token by one more confident than this (0.5)"
    )
    max_post_edit_steps: int | None = Field(
        None, ge=0, le=1024, description="joint_threshold: most steps on a block without masks (16)"
    )

    def defaults(self, model: Denoised, length: int) -> dict[str, object]:
        """With a number of steps, a schedule decides; otherwise the model's threshold does."""
        algorithm, block = self.algorithm or model.algorithm, self.block_length or model.block
        found: dict[str, object] = {"algorithm": algorithm, "block_length": block, "steps": block}
        if algorithm == "joint_threshold":
            found |= _JOINT
        elif self.steps is None and self.factor is None and algorithm in _BY_PROBABILITY:
            found["threshold"] = model.threshold
        return found

    def check(self, model: Denoised, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        assert self.block_length
        assert model.attended
        if model.attended % self.block_length:
            message = f"block_length {self.block_length} does not divide the model's blocks of {model.attended}"
            _refuse(message, "block_length")
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
        super().check(model, sampling, num_layers, prompt_tokens)


class NoiseParams(DenoisingParams):
    """Parameters of DiffusionGemma, whose canvases begin as random tokens."""

    models: ClassVar[str] = "models whose canvases begin as noise (DiffusionGemma)"
    algorithms: ClassVar[tuple[Algorithm, ...]] = ("entropy_bound",)

    entropy_bound: float | None = Field(
        None, gt=0, le=1e6, description="accept tokens while the entropies of the others add up to this (0.1)"
    )
    t_min: float | None = Field(None, ge=0, le=100, description="temperature of the last step (0.4)")
    t_max: float | None = Field(None, gt=0, le=100, description="temperature of the first step (0.8)")
    stability_threshold: int | None = Field(
        None, ge=0, le=1024, description="end a canvas that did not change in this many steps (1), if it is certain"
    )
    confidence_threshold: float | None = Field(
        None, ge=0, le=100, description="mean entropy below which a canvas is certain (0.005); 0: all steps are done"
    )

    def defaults(self, model: Denoised, length: int) -> dict[str, object]:
        return {**model.defaults, "algorithm": model.algorithm, "block_length": model.block}

    def check(self, model: Denoised, sampling: SamplingParams, num_layers: int, prompt_tokens: int) -> None:
        if self.block_length != model.block:
            _refuse(f"block_length is {self.block_length}; the model's is {model.block}", "block_length")
        if (self.t_min or 0.0) > (self.t_max or 0.0):
            _refuse(f"t_min is {self.t_min}, more than t_max, {self.t_max}", "t_min")
        super().check(model, sampling, num_layers, prompt_tokens)


_KINDS: tuple[type[DenoisingParams], ...] = (BidirectionalParams, BlockParams, NoiseParams)


def params_kind(model: Denoised) -> type[DenoisingParams]:
    """The class of a model's parameters."""
    if model.algorithm in NoiseParams.algorithms:
        return NoiseParams
    return BidirectionalParams if model.attended is None else BlockParams


class DiffusionParams(BidirectionalParams, BlockParams, NoiseParams):
    """The parameters of all kinds, as requests send them, with the names of LLaDA, Dream, Fast-dLLM and DiffusionGemma.

    `filled` returns the parameters of the model's kind.
    """

    def filled(self, model: Denoised, sampling: SamplingParams) -> DenoisingParams:
        """The parameters of the model's kind, with the defaults of the model and the request.

        Raises:
            InvalidRequest: for parameters of other kinds.
        """
        kind, given = params_kind(model), self.model_dump(exclude_defaults=True)
        for name in given:
            if name not in kind.model_fields:
                _refuse_foreign(name, [other for other in _KINDS if name in other.model_fields], kind, name)
        if self.algorithm is not None and self.algorithm not in kind.algorithms:
            owners = [other for other in _KINDS if self.algorithm in other.algorithms]
            _refuse_foreign(f"algorithm {self.algorithm}", owners, kind, "algorithm")
        length = self.gen_length or sampling.max_new_tokens or DEFAULT_LENGTH
        asked = kind.model_construct(**given)
        defaults = {**asked.defaults(model, length), "gen_length": length}
        return asked.model_copy(update={name: defaults[name] for name in defaults if getattr(asked, name) is None})


def _refuse_foreign(what: str, owners: list[type[DenoisingParams]], kind: type[DenoisingParams], name: str) -> NoReturn:
    _refuse(f"{what} is for {' and '.join(owner.models for owner in owners)}, not for {kind.models}", name)


def _refuse_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest for sampling parameters that diffusion models do not support."""
    default = SamplingParams()
    if sampling.max_new_tokens == 0:
        raise InvalidRequest("max_new_tokens must be at least 1 for diffusion models", param="max_new_tokens")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    for name in ("min_p", "min_new_tokens", "allowed_token_ids", "bad_words", *CONSTRAINTS, *penalties):
        if getattr(sampling, name) != getattr(default, name):
            raise InvalidRequest(f"{name} is not supported for diffusion models", param=name)


def _refuse(message: str, name: str) -> NoReturn:
    raise InvalidRequest(message, param=f"diffusion.{name}")
