"""Latent attention (DeepSeek-V2, section 2.1): config keys, tensor names and shapes."""

import math
from dataclasses import dataclass
from typing import Any

from runtime.models.config_json import Unsupported, positive_size

# transformers gives the norms of latents this epsilon, whatever the configuration says.
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention whose keys and values are products of one latent vector per token, which alone is cached.

    Attributes:
        rank: size of the latent vector.
        query_rank: size of the vector from which queries are computed; 0: queries are computed from the input.
        plain, rotated, value: dimensions of a head: of keys without and with rotation, and of values. The rotated key
            is shared by all heads.
        scale: factor on the products of queries and keys.
        interleaved: whether the checkpoint has rotated dimensions in pairs, not in halves.
    """

    rank: int
    query_rank: int
    plain: int
    rotated: int
    value: int
    scale: float
    interleaved: bool

    @property
    def row(self) -> int:
        """Values of a cached row: the latent vector and the rotated key."""
        return self.rank + self.rotated

    @property
    def factor(self) -> float:
        """Factor on queries; attention itself divides by the root of a row's size."""
        return self.scale * self.row**0.5

    def tensors(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Names, without the layer's prefix, and shapes of a layer's tensors; `hidden`: hidden size."""
        queries = (heads * (self.plain + self.rotated), self.query_rank or hidden)
        shapes: dict[str, tuple[int, ...]] = {f"q_{'b_' if self.query_rank else ''}proj": queries}
        if self.query_rank:
            shapes |= {"q_a_proj": (self.query_rank, hidden), "q_a_layernorm": (self.query_rank,)}
        shapes |= {
            "kv_a_proj_with_mqa": (self.row, hidden),
            "kv_a_layernorm": (self.rank,),
            "kv_b_proj": (heads * (self.plain + self.value), self.rank),
            "o_proj": (hidden, heads * self.value),
        }
        return {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}


def latent_spec(config: dict[str, Any], architecture: str) -> LatentSpec:
    """The latent attention of a configuration of `LATENT`. Raises KeyError (missing key), ModelError."""
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise Unsupported(f"{architecture} has biases; supported are models without them")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, plain, rotated, value = (positive_size(config, name) for name in names)
    query_rank = positive_size(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
    if odd := [name for name in (*names, "q_lora_rank") if (config.get(name) or 0) % 2]:
        raise Unsupported(f"the model's {odd[0]} is {config[odd[0]]}; supported are even numbers")
    return LatentSpec(
        rank=rank,
        query_rank=query_rank,
        plain=plain,
        rotated=rotated,
        value=value,
        scale=(plain + rotated) ** -0.5 * _temperature(config.get("rope_parameters") or config.get("rope_scaling")),
        interleaved=architecture == "DeepseekV2ForCausalLM" or bool(config.get("rope_interleave", True)),
    )


def _temperature(scaling: dict[str, Any] | None) -> float:
    """YaRN's factor on the products; cos and sin have their own."""
    scaling = scaling or {}
    kind, factor = scaling.get("rope_type") or scaling.get("type") or "default", float(scaling.get("factor") or 1.0)
    strength = float(scaling.get("mscale_all_dim") or 0.0)
    if kind == "default" or not strength or factor <= 1:
        return 1.0
    return float((0.1 * strength * math.log(factor) + 1.0) ** 2)
