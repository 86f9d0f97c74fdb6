"""Weights from safetensors files, checked against the model's spec."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from safetensors import safe_open
from tqdm import tqdm

from runtime.errors import ModelError
from runtime.models.config_json import holds_codes
from runtime.models.families import SEEING
from runtime.models.spec import DecoderSpec, ModelSpec
from runtime.models.tensor_files import FLOATS, check_tensor, dtype_of, find_files, locate, open_file

if TYPE_CHECKING:
    from runtime.models.shards import Shard

_BAR_FROM_BYTES = 1 << 30
_DIGESTED_BYTES = 1 << 24
# Suffixes of packed experts' tensors, which are stored as bytes.
_BYTES = ("_blocks", "_scales")


def load_weights(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, shard: Shard | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of `spec.expected_tensors()` by name, in `dtype`, on the CPU. Experts in MXFP4 stay packed.

    With a shard, each tensor is this rank's part. Tied models then also get an `lm_head.weight`, because the head is
    sharded but the embedding is not. Peak memory is the result plus one tensor.

    Raises:
        ModelError: if a file is missing or truncated, or a tensor is missing or has a wrong shape or type.
    """
    if holds_codes(directory):
        from runtime.models.stored import unpack

        tensors = unpack(directory, spec, dtype)
    else:
        tensors = _read_tensors(directory, spec, dtype)
    weights = {name: tensor if shard is None else shard.cut(name, tensor).clone() for name, tensor in tensors}
    if shard is not None and spec.tie_embeddings:
        weights["lm_head.weight"] = shard.head(weights["model.embed_tokens.weight"]).clone()
    return weights


def _read_tensors(directory: Path, spec: DecoderSpec, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    expected = spec.expected_tensors()
    names = {spec.stored_name(name): name for name in expected}
    files = locate(directory, list(names))
    total = sum(path.stat().st_size for path in files)
    # None: tqdm shows its bar on terminals only.
    disable = None if total >= _BAR_FROM_BYTES else True
    with tqdm(total=len(expected), desc="loading", unit="tensor", disable=disable) as bar:
        for path, stored in files.items():
            with open_file(path) as file:
                for name in stored:
                    own = names[name]
                    yield own, _read(file, path, name, expected[own], dtype_of(own, spec, dtype))
                    bar.update()


def find_weights(directory: Path) -> list[Path]:
    """All safetensors files of a model. Raises ModelError if there are none, or a tensor is float8."""
    files = find_files(directory)
    for path in files:
        with open_file(path) as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                if (kind := file.get_slice(name).get_dtype()).startswith("F8"):
                    raise ModelError(f"{path}: {name} is stored as {kind}; supported are {', '.join(FLOATS)}")
    return files


def digest_weights(directory: Path, spec: ModelSpec) -> str:
    """A digest of the contents of all files with the model's weights. Raises ModelError."""
    state = xxhash.xxh3_128()
    for path in _files_of(directory, spec):
        with path.open("rb") as file:
            while data := file.read(_DIGESTED_BYTES):
                state.update(data)
    return state.hexdigest()


def _files_of(directory: Path, spec: ModelSpec) -> list[Path]:
    """The files with the weights that affect KV."""
    from runtime.models.gguf_tensors import GGUFTensors

    if (linked := GGUFTensors.open(directory)) is not None:
        return [linked.path]
    # With a tower, KV also depends on its weights.
    if isinstance(spec, DecoderSpec) and spec.architecture not in SEEING and not holds_codes(directory):
        return sorted(locate(directory, [spec.stored_name(name) for name in spec.expected_tensors()]))
    return find_files(directory)


def random_weights(
    spec: DecoderSpec, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
) -> dict[str, torch.Tensor]:
    """Random weights on `device`, like a result of `load_weights`; equal in every call. Norms are 1, biases 0."""
    weights = {}
    for name, shape in spec.unpacked.expected_tensors().items():
        if len(shape) == 1 or name.endswith("bias"):
            tensor = torch.full(shape, float(name.endswith("norm.weight")), dtype=dtype, device=device)
        else:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            tensor = torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[1] ** -0.5, generator=generator)
        weights[name] = tensor if shard is None else shard.cut(name, tensor).clone()
    if shard is not None and spec.tie_embeddings:
        weights["lm_head.weight"] = shard.head(weights["model.embed_tokens.weight"]).clone()
    return weights


def _read(file: safe_open, path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    stored = file.get_slice(name)
    supported = ("U8",) if name.endswith(_BYTES) else FLOATS
    check_tensor(path, name, stored.get_dtype(), tuple(stored.get_shape()), supported, shape)
    tensor = file.get_tensor(name)
    if name.endswith(_BYTES):
        dtype = torch.uint8
    # Clone a tensor that needs no conversion, because it would keep the file mapped.
    return tensor.clone() if tensor.dtype == dtype else tensor.to(dtype)
