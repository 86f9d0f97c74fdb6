"""Reads low-rank adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError

from runtime.errors import ModelError
from runtime.models.config_json import parse_json

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Prefix of module names, from PEFT's wrappers.
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Fields that, unless empty or false, request more than W + scale B A.
_MORE = (
    "use_dora", "modules_to_save", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layer_replication",
    "lora_bias", "target_parameters", "trainable_token_indices", "use_qalora", "alora_invocation_tokens",
    "arrow_config", "use_bdlora",
)  # fmt: skip
# Initialisations that do not change the base model's weights, as PiSSA, OLoRA and LoftQ do.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")

# Largest rank and scale. Python's integers have any size, and float32 ends at 3e38.
_MOST_RANK, _MOST_ALPHA = 1 << 20, 1e30


class LowRank(NamedTuple):
    """The update b @ a of a weight [out, in], with a [rank, in] and b [out, rank], which includes the scale."""

    a: torch.Tensor
    b: torch.Tensor

    def to(self, dtype: torch.dtype, device: torch.device) -> LowRank:
        return LowRank(self.a.to(device, dtype), self.b.to(device, dtype))

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add the update's product with x [n, in] to out [n, out], in place."""
        out += x @ self.a.t() @ self.b.t()


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A low-rank adapter.

    Attributes:
        digest: hash of its configuration and weights.
        rank: rank of every update.
        factors: updates, float32 on the CPU, by name of the module whose weight they change.
    """

    digest: str
    rank: int
    factors: dict[str, LowRank]


def read_lora(directory: Path) -> LoraAdapter:
    """Read an adapter. Raises ModelError if it is invalid, or changes more than weights by low-rank products."""
    weights = directory / _WEIGHTS
    if not weights.is_file():
        if (directory / _PICKLE).exists():
            raise ModelError(f"{directory / _PICKLE} is a pickle, which Ramet never loads: convert it to safetensors")
        raise ModelError(f"{directory} has no {_WEIGHTS}; a directory with an adapter of PEFT is needed")
    if not (directory / _CONFIG).is_file():
        raise ModelError(f"{directory} has no {_CONFIG}; a directory with an adapter of PEFT is needed")
    try:  # each file once: another may take its place at any time
        described, data = (directory / _CONFIG).read_bytes(), weights.read_bytes()
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {error}") from None
    rank, scale = _scale(parse_json(described, directory / _CONFIG), directory / _CONFIG)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{weights} is not a complete safetensors file: {error}") from None
    digest = hashlib.blake2b(described, digest_size=16)
    digest.update(data)
    factors = {}
    for module, a, b in low_rank_pairs(tensors, weights):
        if not module.startswith(_PREFIX):
            raise ModelError(f"{weights}: {module}{_A} does not begin with {_PREFIX}, as PEFT's tensors do")
        if len(a) != rank:
            raise ModelError(f"{weights}: {module}{_A} has rank {len(a)}; {_CONFIG} says r = {rank}")
        factor = LowRank(a.float(), scale * b.float())
        if not (factor.a.isfinite().all() and factor.b.isfinite().all()):
            raise ModelError(f"{weights}: {module} has values that are not finite")
        factors[module.removeprefix(_PREFIX)] = factor
    return LoraAdapter(digest.hexdigest(), rank, factors)


def low_rank_pairs(tensors: Mapping[str, torch.Tensor], path: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The changed modules of an adapter file as (name, A [rank, in], B [out, rank]).

    Raises ModelError if there are other tensors, or no such pairs.
    """
    modules = sorted(name.removesuffix(_A) for name in tensors if name.endswith(_A))
    pairs = {name for module in modules for name in (module + _A, module + _B)}
    if other := sorted(tensors.keys() ^ pairs):
        missing = "is missing" if other[0] in pairs else "is neither the A nor the B of a linear layer"
        raise ModelError(f"{path}: {other[0]} {missing}")
    if not modules:
        raise ModelError(f"{path} changes no layer")
    for module in modules:
        a, b = tensors[module + _A], tensors[module + _B]
        if not (a.ndim == b.ndim == 2 and len(a) == b.shape[1] and a.is_floating_point() and b.is_floating_point()):
            shapes = f"{list(a.shape)} and {list(b.shape)} of {a.dtype}".replace("torch.", "")
            raise ModelError(f"{path}: the A and B of {module} are {shapes}, not [rank, in] and [out, rank] of floats")
        yield module, a, b


def _scale(config: dict[str, Any], path: Path) -> tuple[int, float]:
    """The rank, and the factor on B A. Raises ModelError for options that are not supported."""
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {config.get('peft_type')!r}; only 'LORA' is served")
    for name in _MORE:
        if config.get(name):
            raise ModelError(f"{path}: {name} is {config[name]!r}, which is not served")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias is {config['bias']!r}; only 'none' is served")
    if (beginning := config.get("init_lora_weights")) not in _PLAIN_BEGINNINGS:
        raise ModelError(f"{path}: init_lora_weights is {beginning!r}, which changes the weights of the base as well")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    told = f"{path}: r is {rank!r:.40} and lora_alpha {alpha!r:.40}; a count and a number are needed"
    if type(rank) is not int or not 1 <= rank <= _MOST_RANK:
        raise ModelError(told)
    if not isinstance(alpha, int | float) or not abs(alpha) <= _MOST_ALPHA:  # that is, nor is it NaN
        raise ModelError(told)
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)
