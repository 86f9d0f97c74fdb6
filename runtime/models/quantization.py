"""`quantization_config` of config.json: how a published checkpoint stores the weights of its linear layers."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from runtime.errors import ModelError
from runtime.models.config_json import method_of

SUPPORTED = (
    "fp8 (e4m3), awq (gemm), gptq (4 and 8 bits), compressed-tensors (pack-, int-, naive- and float-quantized) "
    "and mxfp4 of gpt-oss"
)
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
Layout = Literal["awq", "gptq", "gptq_v2", "packed", "plain"]
Blocks = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight [out, in] of a linear layer is stored.

    Attributes:
        bits: of a code.
        blocks: rows and columns that share a scale; None: all.
        is_float: whether codes are float8 (e4m3).
    """

    layout: Layout
    bits: int
    blocks: Blocks
    is_float: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a checkpoint are stored.

    Attributes:
        name: the method, or the format of compressed-tensors.
        groups: targets, and the scheme of the layers that they match.
        ignored: targets of layers that are not quantised.
    """

    name: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()

    @property
    def has_integers(self) -> bool:
        return not all(scheme.is_float for _, scheme in self.groups)

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a linear layer; None: it is not quantised. Exact names precede patterns, patterns `Linear`."""
        if any(_rank(target, module) is not None for target in self.ignored):
            return None
        ranked = [(_rank(one, module), scheme) for targets, scheme in self.groups for one in targets]
        found = [(rank, scheme) for rank, scheme in ranked if rank is not None]
        return min(found, key=lambda each: each[0])[1] if found else None


def _rank(target: str, module: str) -> int | None:
    """How special a target is that matches a linear layer; None: it does not match."""
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    return {module: 0, "Linear": 2}.get(target)


def read_quantization(config: dict[str, Any]) -> Quantization | None:
    """The quantisation of a configuration; None: weights are plain. Raises ModelError if it is not supported."""
    given = config.get("quantization_config") or config.get("compression_config")
    readers = {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
    if (method := method_of(config)) is None:
        return None
    if not isinstance(given, dict) or method not in readers:
        raise unsupported(method)
    try:
        return readers[method](given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json has a quantization_config of the wrong kind: {error!r}") from None


def unsupported(method: str, what: str = "") -> ModelError:
    """The error for a method, or for `what` it is used with."""
    return ModelError(f"the checkpoint is quantised with {method!r}{what and ', '}{what}; supported are {SUPPORTED}")


def _fp8(given: dict[str, Any]) -> Quantization:
    for key, only in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if given.get(key, only) != only:
            raise unsupported("fp8", f"{key} {given[key]!r}")
    size = given.get("weight_block_size")
    blocks = (None, None) if size is None else _pair(size, "weight_block_size")
    return Quantization("fp8", ((("Linear",), Scheme("plain", 8, blocks, is_float=True)),))


def _awq(given: dict[str, Any]) -> Quantization:
    version = str(given.get("version") or given.get("checkpoint_format") or given.get("format") or "gemm").lower()
    if version != "gemm":
        raise unsupported("awq", f"version {version!r}")
    bits = _bits("awq", given.get("bits", given.get("w_bit")), 4)
    group = _group(given.get("group_size", given.get("q_group_size")))
    return Quantization("awq", ((("Linear",), Scheme("awq", bits, (1, group))),))


def _gptq(given: dict[str, Any]) -> Quantization:
    kind = "marlin" if given.get("is_marlin_format") else given.get("checkpoint_format") or given.get("format")
    layouts: dict[Any, Layout] = {None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}
    if kind not in layouts:
        raise unsupported("gptq", f"checkpoint_format {kind!r}")
    if given.get("pack_dtype", "int32") != "int32":
        raise unsupported("gptq", f"pack_dtype {given['pack_dtype']!r}")
    # Rules that begin with a minus leave layers as they are; others change bits or groups of some layers.
    if rules := [rule for rule in given.get("dynamic") or () if not rule.startswith("-:")]:
        raise unsupported("gptq", f"the dynamic rule {rules[0]!r}")
    scheme = Scheme(layouts[kind], _bits("gptq", given.get("bits"), 4, 8), (1, _group(given.get("group_size"))))
    return Quantization("gptq", ((("Linear",), scheme),))


def _compressed(given: dict[str, Any]) -> Quantization:
    method = "compressed-tensors"
    for key in ("kv_cache_scheme", "transform_config"):
        if given.get(key):
            raise unsupported(method, key)
    if (sparsity := (given.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise unsupported(method, f"sparsity {sparsity!r}")
    if (status := given.get("quantization_status", "compressed")) != "compressed":
        raise unsupported(method, f"quantization_status {status!r}")
    whole = given.get("format")
    groups = tuple(_compressed_group(one, whole) for one in given["config_groups"].values())
    return Quantization(str(whole), groups, tuple(given.get("ignore") or ()))


def _compressed_group(group: Any, whole: Any) -> tuple[tuple[str, ...], Scheme]:
    """Targets and scheme of one of `config_groups`."""
    method = "compressed-tensors"
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        raise unsupported(method, "a group without a scheme of weights")
    if (kind := group.get("format") or whole) not in _FORMATS:
        raise unsupported(method, f"format {kind!r}")
    if others := [one for one in group["targets"] if one[:1].isupper() and one != "Linear"]:
        raise unsupported(method, f"the target {others[0]!r}")
    is_float = weights.get("type", "int") == "float"
    allowed = (8,) if is_float or kind != "pack-quantized" else (4, 8)
    bits = _bits(method, weights.get("num_bits", 8), *allowed)
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    if strategy not in ("tensor", "channel", "group", "block"):
        raise unsupported(method, f"the strategy {strategy!r}")
    blocks: Blocks = {"tensor": (None, None), "channel": (1, None)}.get(strategy, (1, 1))
    if strategy == "group":
        blocks = 1, _group(group_size)
    elif strategy == "block":
        blocks = _pair(weights.get("block_structure"), "block_structure")
    layout: Layout = "packed" if kind == "pack-quantized" else "plain"
    if is_float and layout == "packed":
        raise unsupported(method, "packed floats")
    return tuple(group["targets"]), Scheme(layout, bits, blocks, is_float)


def _bits(method: str, given: Any, *supported: int) -> int:
    if given not in supported:
        raise unsupported(method, f"{given!r} bits")
    return int(given)


def _group(given: Any) -> int | None:
    """Columns that share a scale; None: all."""
    if given == -1:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ModelError(
            f"config.json has group_size {given!r} of quantised weights; it must be a positive integer or -1"
        )
    return given


def _pair(given: Any, name: str) -> tuple[int, int]:
    if isinstance(given, str):  # as older files write it
        given = [int(part) for part in given.split("x")]
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(one, int) and one > 0 for one in given):
        raise ModelError(f"config.json has {name} {given!r}; it must be two positive integers")
    return given[0], given[1]
