"""Layers that keep a state of fixed size in place of keys and values: config keys, tensor names, shapes."""

from dataclasses import dataclass
from typing import Any

from runtime.errors import ModelError
from runtime.models.config_json import positive_size
from runtime.models.families import HYBRIDS

_LFM2_PARTS = {
    "self_attn.o_proj": "self_attn.out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Gated short convolutions (LFM2): out(C * conv(B * x)), where B, C, x are projections.

    Attributes:
        layers: indices of the layers without attention.
        channels: of the convolution.
        width: number of positions that an output depends on.
        bias: whether projections and convolution have biases.
    """

    layers: tuple[int, ...]
    channels: int
    width: int
    bias: bool = False
    output = "conv.out_proj"

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a layer's state tensors: the last inputs of the convolution."""
        return ((self.channels, self.width - 1),)

    @property
    def record(self) -> int:
        """Floats of a row that change the state."""
        return 2 * self.channels

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Names, without the layer's prefix, and shapes of a layer's tensors; `hidden`: hidden size."""
        inner = self.channels
        shapes: dict[str, tuple[int, ...]] = {
            "conv.in_proj.weight": (3 * inner, hidden),
            "conv.conv.weight": (inner, 1, self.width),
            "conv.out_proj.weight": (hidden, inner),
        }
        biases = {"conv.in_proj.bias": (3 * inner,), "conv.conv.bias": (inner,), "conv.out_proj.bias": (hidden,)}
        return shapes | biases if self.bias else shapes


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta nets (Yang et al., 2024) behind a short convolution (Qwen3.5, Qwen3-Next).

    Attributes:
        layers, width: see `ConvSpec`.
        k_heads, v_heads: several heads of values share a head of queries and keys.
        k_dim, v_dim: their sizes.
        grouped: whether the checkpoint has all projections that belong to a head of keys side by side.
        separate: whether only betas and decays are grouped so.
        tiled: whether the heads of values that share a head of keys are `k_heads` apart, not adjacent.
    """

    layers: tuple[int, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    width: int
    grouped: bool = False
    separate: bool = False
    tiled: bool = False
    output = "linear_attn.out_proj"

    def __post_init__(self) -> None:
        """Raises ModelError."""
        if self.v_heads % self.k_heads:
            raise ModelError(
                f"the model has {self.v_heads} linear value heads, not a multiple of its {self.k_heads} key heads"
            )

    @property
    def channels(self) -> int:
        """Columns of queries, keys and values, which the convolution mixes."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a layer's state tensors: last inputs of the convolution, and the matrix of each head."""
        return (self.channels, self.width - 1), (self.v_heads, self.k_dim, self.v_dim)

    @property
    def record(self) -> int:
        """See `ConvSpec`: queries, keys, values, and two gates for each head."""
        return self.channels + 2 * self.v_heads

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """See `ConvSpec`."""
        values = self.v_heads * self.v_dim
        if self.separate:
            inputs = {"qkv": self.channels, "z": values, "ba": 2 * self.v_heads}
        elif self.grouped:
            inputs = {"qkvz": self.channels + values, "ba": 2 * self.v_heads}
        else:
            inputs = {"qkv": self.channels, "z": values, "b": self.v_heads, "a": self.v_heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"linear_attn.in_proj_{name}.weight": (rows, hidden) for name, rows in inputs.items()
        }
        return shapes | {
            "linear_attn.conv1d.weight": (self.channels, 1, self.width),
            "linear_attn.dt_bias": (self.v_heads,),
            "linear_attn.A_log": (self.v_heads,),
            "linear_attn.norm.weight": (self.v_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        }


RecurrenceSpec = ConvSpec | DeltaSpec


def recurrence_spec(config: dict[str, Any], family: str) -> RecurrenceSpec | None:
    """The recurrent layers of a configuration of `as_hybrid`; None: there are none. Raises KeyError, ModelError."""
    names = ("full_attention", "conv" if family == "Lfm2" else "linear_attention")
    types, count = config["layer_types"], positive_size(config, "num_hidden_layers")
    if len(types) < count or set(types) - set(names) or "full_attention" not in types[:count]:
        raise ModelError(f"config.json has layer_types {types}; each layer needs {' or '.join(names)}, one the first")
    layers = tuple(i for i in range(count) if types[i] != "full_attention")
    if not layers:
        return None
    if family == "Lfm2":
        hidden, width = positive_size(config, "hidden_size"), positive_size(config, "conv_L_cache", 3)
        return ConvSpec(layers, hidden, width, bool(config.get("conv_bias", False)))
    return DeltaSpec(
        layers,
        k_heads=positive_size(config, "linear_num_key_heads", 16),
        v_heads=positive_size(config, "linear_num_value_heads", 32),
        k_dim=positive_size(config, "linear_key_head_dim", 128),
        v_dim=positive_size(config, "linear_value_head_dim", 128),
        width=positive_size(config, "linear_conv_kernel_dim", 4),
        grouped=family == "Qwen3Next",
        separate=bool(config.get("linear_projections_separate", False)),
        tiled=bool(config.get("linear_value_heads_tiled", False)),
    )


def as_hybrid(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """A configuration of `HYBRIDS` with the keys of other models and the published defaults filled in."""
    if HYBRIDS[architecture] == "Lfm2":
        return _as_lfm2(config)
    text = config.get("text_config") or config
    kept: dict[str, Any] = {name: config[name] for name in ("tie_word_embeddings", "eos_token_id") if name in config}
    layers = range(positive_size(text, "num_hidden_layers"))
    every = positive_size(text, "full_attention_interval", 4)
    types = ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    given = {name: value for name, value in text.items() if value is not None}
    defaults: dict[str, Any] = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "layer_types": types,
        "attention_bias": False,
    }
    return {**defaults, **kept, **given, "architectures": [architecture]}


def _as_lfm2(config: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in config.items() if value is not None}
    inner = given.get("block_ff_dim", given.get("intermediate_size", 12288))
    if given.get("block_auto_adjust_ff_dim", True):
        multiple = positive_size(given, "block_multiple_of", 256)
        inner = int(given.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    layers = range(positive_size(given, "num_hidden_layers"))
    attended = given.get("full_attn_idxs", layers)
    own = {
        "intermediate_size": inner,
        "rms_norm_eps": given.get("norm_eps", 1e-5),
        "tie_word_embeddings": given.get("tie_embedding", given.get("tie_word_embeddings", True)),
    }
    types = ["full_attention" if i in attended else "conv" for i in layers]
    return {"rope_theta": 1e6, "layer_types": types, **given, **own}


def lfm2_name(name: str) -> str:
    """The name of a Llama tensor in LFM2's checkpoints."""
    for ours, theirs in _LFM2_PARTS.items():
        name = name.replace(ours, theirs)
    return name
