"""Mixtures of experts: config keys and tensor names."""

import math
from dataclasses import dataclass
from typing import Any

from runtime.errors import ModelError
from runtime.models.config_json import Unsupported, method_of
from runtime.models.families import LATENT

# Number of values that share a scale.
MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Experts that replace the MLP of a layer. Each row uses a few of them.

    Attributes:
        layers: indices of the layers with experts.
        count, chosen: number of experts per layer, and number that each row uses.
        inner: inner columns of an expert.
        shared: inner columns of the expert that every row uses; 0: there is none.
        sigmoid: whether scores are sigmoids, with a bias that affects only the choice; otherwise a softmax.
        normalized: whether the weights of a row's experts are scaled to sum to 1.
        groups, chosen_groups: experts are chosen only from the groups whose best scores have the largest sums.
        best: number of best scores of a group that are summed.
        scale: factor on the weights.
        limit: bound of gate and up; None: unbounded. Only gpt-oss has a limit. Its router and experts also have biases.
        fused: whether the checkpoint has the experts of gpt-oss in one tensor, with gate and up interleaved.
        alpha: factor in the argument of the gate's sigmoid.
        packed: whether the checkpoint has the experts' weights in MXFP4.
        shared_gate: whether each row's output of the shared expert is multiplied by a sigmoid.
    """

    layers: tuple[int, ...]
    count: int
    chosen: int
    inner: int
    shared: int = 0
    sigmoid: bool = False
    normalized: bool = True
    groups: int = 1
    chosen_groups: int = 1
    best: int = 2
    scale: float = 1.0
    limit: float | None = None
    alpha: float = 1.0
    packed: bool = False
    fused: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        """Raises ModelError."""
        for name in ("count", "chosen", "inner", "groups", "chosen_groups"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ModelError(f"config.json has experts with {name} {value!r}; it must be a positive integer")
        in_groups = self.count // self.groups * self.chosen_groups
        if self.count % self.groups or self.chosen_groups > self.groups or self.chosen > in_groups:
            raise ModelError(
                f"config.json has {self.chosen} of {self.count} experts, in {self.chosen_groups} of {self.groups} "
                "groups; these numbers do not fit each other"
            )

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Names, without the layer's prefix, and shapes of a layer's tensors; `hidden`: hidden size."""
        if self.fused:
            return self._fused_tensors(hidden)
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (self.count, hidden)}
        if self.sigmoid:
            shapes["mlp.gate.expert_bias"] = (self.count,)
        mlps = {f"mlp.experts.{i}": self.inner for i in range(self.count)}
        if self.shared:
            mlps["mlp.shared_experts"] = self.shared
        if self.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        for name, inner in mlps.items():
            shapes |= {f"{name}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
            shapes[f"{name}.down_proj.weight"] = (hidden, inner)
        if self.limit is not None:
            shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
        return shapes

    def _fused_tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.router.weight": (self.count, hidden),
            "mlp.router.bias": (self.count,),
        }
        for name, columns, rows in (("gate_up", hidden, 2 * self.inner), ("down", self.inner, hidden)):
            name = f"mlp.experts.{name}_proj"
            shapes[f"{name}_bias"] = (self.count, rows)
            if self.packed:
                if columns % MXFP4_BLOCK:
                    raise ModelError(f"{name} is in MXFP4 and has {columns} columns, no multiple of {MXFP4_BLOCK}")
                blocks = (self.count, rows, columns // MXFP4_BLOCK)
                shapes |= {f"{name}_blocks": (*blocks, MXFP4_BLOCK // 2), f"{name}_scales": blocks}
            else:
                shapes[name] = (self.count, columns, rows)
        return shapes


def expert_spec(config: dict[str, Any], architecture: str) -> ExpertSpec | None:
    """The experts of a configuration of `WITH_EXPERTS`; None: no layer has any. Raises KeyError, ModelError."""
    if architecture == "GptOssForCausalLM":
        return _gpt_oss(config)
    if architecture in LATENT:
        return _deepseek(config, architecture == "DeepseekV3ForCausalLM")
    # Newer versions of transformers write `num_local_experts`, published checkpoints have `num_experts`.
    count = config.get("num_local_experts") or config["num_experts"]
    chosen, inner = config["num_experts_per_tok"], config["moe_intermediate_size"]
    layers = range(config["num_hidden_layers"])
    if architecture != "LLaDA2MoeModelLM":
        every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        if every == 0:
            raise ModelError("config.json has decoder_sparse_step 0; it must be a positive integer")
        sparse = tuple(i for i in layers if i not in dense and (i + 1) % every == 0)
        is_next = architecture == "Qwen3NextForCausalLM"
        shared = config.get("shared_expert_intermediate_size", 512) if is_next else 0
        normalized = bool(config.get("norm_topk_prob", is_next))
        return ExpertSpec(sparse, count, chosen, inner, shared, normalized=normalized, shared_gate=bool(shared))
    return ExpertSpec(
        tuple(layers[config.get("first_k_dense_replace", 0) :]),
        count,
        chosen,
        inner,
        shared=inner * (config.get("num_shared_experts") or 0),
        sigmoid=True,
        normalized=chosen > 1,
        groups=config["n_group"],
        chosen_groups=config["topk_group"],
        scale=float(config["routed_scaling_factor"]),
    )


def _deepseek(config: dict[str, Any], is_third: bool) -> ExpertSpec | None:
    """Experts of DeepSeek-V2 or, if `is_third`, V3, with defaults of transformers, where only V3 normalises weights."""
    layers, inner = range(config["num_hidden_layers"]), config["moe_intermediate_size"]
    sparse = tuple(layers[config.get("first_k_dense_replace") or 0 :])
    method = config.get("topk_method") or "greedy"
    if not is_third and method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"the model's topk_method is {method!r}; supported are greedy and group_limited_greedy")
    in_groups = is_third or method != "greedy"
    return (
        ExpertSpec(
            sparse,
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            inner,
            shared=inner * (config.get("n_shared_experts", 1 if is_third else 2) or 0),
            sigmoid=is_third,
            normalized=is_third and bool(config.get("norm_topk_prob", True)),
            groups=config["n_group"] if in_groups else 1,
            chosen_groups=config["topk_group"] if in_groups else 1,
            best=2 if is_third else 1,
            scale=float(config.get("routed_scaling_factor", 2.5 if is_third else 1.0)),
        )
        if sparse
        else None
    )


def _gpt_oss(config: dict[str, Any]) -> ExpertSpec:
    return ExpertSpec(
        tuple(range(config["num_hidden_layers"])),
        config["num_local_experts"],
        config["num_experts_per_tok"],
        config["intermediate_size"],
        limit=_positive(config, "swiglu_limit", 7.0),
        alpha=_positive(config, "swiglu_alpha", 1.702),
        packed=method_of(config) == "mxfp4",
        fused=not config.get("experts_separate"),
    )


def _positive(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json has {name} {value!r}; it must be a positive number")
    return float(value)
