"""Specifications of rotary embeddings, read from config.json."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from runtime.errors import ModelError
from runtime.models.config_json import Unsupported

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding. `kind` decides which fields apply.

    Attributes:
        original_context: context length before scaling (llama3, yarn).
        amplitude: factor on cos and sin (yarn).
        axes: for each rotated pair of dimensions, which of a row's positions rotates it: that in time (0), height (1)
            or width (2); empty: a row has one position.
        rotated: number of leading dimensions of a head that are rotated; 0: all.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    rotated: int = 0
    axes: tuple[int, ...] = field(default=(), repr=False)


def read_rope(config: dict[str, Any], divided: int | None) -> RopeSpec:
    """The rotary embedding, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters`.

    `divided`: the head size, if the model may rotate only a part of each head; None: the whole head must rotate.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise Unsupported(
            f"the model has a rotary embedding for each of {', '.join(scaling)}; supported is one for all"
        )
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "mrope":  # says no more than `mrope_section`
        kind = "default"
    if kind not in ROPE_KINDS:
        raise Unsupported(f"the model's rope scaling is {kind!r}; supported are {', '.join(ROPE_KINDS)}")
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0 and divided is None:
        raise Unsupported(f"the model rotates {partial} of each head; supported is 1.0 (partial_rotary_factor)")
    rotated = 0 if divided is None or partial == 1.0 else int(divided * partial)
    if rotated % 2 or not 0 <= rotated <= (divided or 0):
        raise ModelError(f"partial_rotary_factor is {partial}; it must rotate an even part of {divided} dimensions")
    if kind == "default":
        return RopeSpec(theta, rotated=rotated)
    # The same precedence as in transformers.
    name = "original_max_position_embeddings"
    original = config.get(name) or scaling.get(name) or config["max_position_embeddings"]
    factor = float(scaling["factor"])
    return RopeSpec(
        theta=theta,
        kind=cast(Any, kind),
        factor=factor,
        original_context=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        amplitude=_yarn_amplitude(scaling, factor) if kind == "yarn" else 1.0,
        rotated=rotated,
    )


def read_gemma_ropes(config: dict[str, Any]) -> tuple[RopeSpec, RopeSpec]:
    """Gemma 3's rotary embeddings: for layers with full attention, and for layers with a window."""
    given = config.get("rope_parameters") or {}
    far = {"rope_theta": config.get("rope_theta", 1e6)} | (config.get("rope_scaling") or {})
    near = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    far, near = given.get("full_attention") or far, given.get("sliding_attention") or near
    return read_rope({**config, "rope_parameters": far}, None), read_rope({**config, "rope_parameters": near}, None)


def _yarn_amplitude(scaling: dict[str, Any], factor: float) -> float:
    """YaRN's attention temperature, as a factor on cos and sin."""

    def mscale(value: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * value * math.log(factor) + 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return mscale(over) / mscale(under) if over and under else mscale(1.0)
