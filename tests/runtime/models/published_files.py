"""Small quantised checkpoints, written as the formats are defined, and the same weights unpacked."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.execution.transformers.architectures import save_small

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "head_dim": 16}
# Of latent attention.
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GROUP = 32
# Not quantised, though in layers of a kind that is.
PLAIN = "model.layers.1.self_attn.o_proj"
Tensors = dict[str, torch.Tensor]


def rounded(weight: torch.Tensor, bits: int, group: int, is_symmetric: bool, dtype: torch.dtype, order: Any = None):
    """Codes [n, k], scales and zeros [n, groups], and the weights that they stand for. `order`: each column's group."""
    n, k = weight.shape
    order, most = torch.arange(k) // group if order is None else order, 2**bits - 1
    scales, zeros = torch.zeros(n, k // group), torch.full((n, k // group), 2 ** (bits - 1))
    for i in range(k // group):
        part = weight[:, order == i]
        if is_symmetric:
            scales[:, i] = part.abs().amax(1) / (most // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, i] = (high - low) / most
            zeros[:, i] = (-low / scales[:, i]).round().clamp(0, most)
    scales = scales.to(dtype)
    each = scales.float()[:, order]
    codes = ((weight / each).round() + zeros[:, order]).clamp(0, most).int()
    return codes, scales, zeros.int(), each * (codes - zeros[:, order])


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, k * bits / 32]: the first of each 32 / bits numbers in the lowest bits."""
    each = 32 // bits
    words = np.zeros((numbers.shape[0], -(-numbers.shape[1] // each)), np.uint32)
    for column in range(numbers.shape[1]):
        words[:, column // each] |= numbers[:, column].numpy().astype(np.uint32) << np.uint32(column % each * bits)
    return torch.from_numpy(words.view(np.int32))


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = rounded(weight, 4, GROUP, False, torch.float16)

    def interleaved(numbers: torch.Tensor) -> torch.Tensor:
        """int32 [rows, n / 8] of [n, rows]."""
        by_place = numbers.t().unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
        return packed(by_place, 4)

    return {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales.t().contiguous()}, values


def gptq(weight: torch.Tensor, bits: int, is_symmetric: bool, offset: int = 1, shuffled: bool = False):
    k = weight.shape[1]
    order = torch.arange(k) // GROUP
    if shuffled:
        order = order[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    codes, scales, zeros, values = rounded(weight, bits, GROUP, is_symmetric, torch.float16, order)
    tensors = {"qweight": packed(codes, bits).t().contiguous(), "scales": scales.t().contiguous(), "g_idx": order.int()}
    return tensors | {"qzeros": packed((zeros.t() - offset) & 2**bits - 1, bits)}, values


def packed_groups(weight: torch.Tensor, bits: int, is_symmetric: bool, group: int = GROUP, shuffled: bool = False):
    k = weight.shape[1]
    group, order = group if group > 0 else k, None
    if shuffled:
        order = (torch.arange(k) // group)[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
    codes, scales, zeros, values = rounded(weight, bits, group, is_symmetric, torch.bfloat16, order)
    tensors = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not is_symmetric:
        tensors["weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
    if order is not None:
        tensors["weight_g_idx"] = order.int()
    return tensors, values


def int8(weight: torch.Tensor, is_symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = rounded(weight, 8, weight.shape[1], is_symmetric, torch.bfloat16)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return tensors if is_symmetric else tensors | {"weight_zero_point": (zeros - 128).to(torch.int8)}, values


def float8(weight: torch.Tensor, rows: int, columns: int, name: str, shape: tuple[int, ...] | None = None):
    """With a scale for each block of rows and columns; 0: all."""
    n, k = weight.shape
    rows, columns = rows or n, columns or k
    scales = torch.zeros(-(-n // rows), -(-k // columns))
    codes, values = torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.zeros(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            values[block] = codes[block].float() * scales[i, j]
    return {"weight": codes, name: scales if shape is None else scales.view(shape)}, values


@dataclass(frozen=True)
class Format:
    """A published format.

    Attributes:
        config: `quantization_config`.
        write: tensors of a weight [n, k], by suffix, and the values that they stand for.
        exact: whether the kernels' codes hold the weights.
    """

    config: dict[str, Any]
    write: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    exact: bool = False


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "format": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", PLAIN, r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
    }


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_FLOAT = {"type": "float", "num_bits": 8}
_GROUPS = {"strategy": "group", "group_size": GROUP}
FORMATS = {
    "awq": Format(_AWQ, awq, True),
    "gptq": Format(_GPTQ, partial(gptq, bits=4, is_symmetric=True), True),
    "gptq asymmetric": Format(_GPTQ | {"sym": False}, partial(gptq, bits=4, is_symmetric=False), True),
    "gptq v2": Format(
        _GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        partial(gptq, bits=4, is_symmetric=False, offset=0),
        True,
    ),
    "gptq of 8 bits": Format(_GPTQ | {"bits": 8}, partial(gptq, bits=8, is_symmetric=True), True),
    "gptq in another order": Format(
        _GPTQ | {"desc_act": True}, partial(gptq, bits=4, is_symmetric=True, shuffled=True)
    ),
    "packed": Format(
        _compressed("pack-quantized", num_bits=4, **_GROUPS), partial(packed_groups, bits=4, is_symmetric=True), True
    ),
    "packed asymmetric": Format(
        _compressed("pack-quantized", num_bits=4, symmetric=False, **_GROUPS),
        partial(packed_groups, bits=4, is_symmetric=False),
        True,
    ),
    "packed channels of 8 bits": Format(
        _compressed("pack-quantized", num_bits=8, strategy="channel"),
        partial(packed_groups, bits=8, is_symmetric=True, group=-1),
        True,
    ),
    "packed in another order": Format(
        _compressed("pack-quantized", num_bits=4, actorder="group", **_GROUPS),
        partial(packed_groups, bits=4, is_symmetric=True, shuffled=True),
    ),
    "int8": Format(_compressed("int-quantized", num_bits=8, strategy="channel"), int8, True),
    "int8 asymmetric": Format(
        _compressed("naive-quantized", num_bits=8, strategy="channel", symmetric=False),
        partial(int8, is_symmetric=False),
    ),
    "fp8 blocks": Format(
        _FP8 | {"weight_block_size": [40, 48]}, partial(float8, rows=40, columns=48, name="weight_scale_inv")
    ),
    "fp8": Format(_FP8, partial(float8, rows=0, columns=0, name="weight_scale", shape=())),
    "float8 tensors": Format(
        _compressed("float-quantized", strategy="tensor", **_FLOAT),
        partial(float8, rows=0, columns=0, name="weight_scale", shape=(1,)),
    ),
    "float8 channels": Format(
        _compressed("float-quantized", strategy="channel", **_FLOAT),
        partial(float8, rows=1, columns=0, name="weight_scale"),
    ),
    "float8 blocks": Format(
        _compressed("float-quantized", strategy="block", block_structure=[40, 48], **_FLOAT),
        partial(float8, rows=40, columns=48, name="weight_scale"),
    ),
}


def is_quantised(name: str) -> bool:
    """Whether a tensor of a checkpoint is the weight of a layer that the formats quantise."""
    inner = "layers." in name and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    return inner and name != f"{PLAIN}.weight"


def write_published(format: Format, directory: Path, architecture: str = "Llama", **fields: Any) -> tuple[Path, Path]:
    """The directories of a quantised checkpoint, and of the same weights in float32."""
    sizes = {**SIZES, "num_hidden_layers": 2} | (LATENT | {"head_dim": None} if "Deepseek" in architecture else {})
    source = save_small(architecture, directory / "plain", **sizes, **fields)
    target = shutil.copytree(source, directory / "published")
    plain = load_file(source / "model.safetensors")
    tensors: Tensors = {}
    for name, weight in plain.items():
        if is_quantised(name):
            parts, plain[name] = format.write(weight)
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    save_file(
        {name: weight.contiguous() for name, weight in plain.items()}, source / "model.safetensors", {"format": "pt"}
    )
    edit_config(target, quantization_config=format.config)
    return target, source


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
