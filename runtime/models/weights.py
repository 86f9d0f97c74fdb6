"""Weights from safetensors files, checked against the model's spec."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import safe_open
from tqdm import tqdm

from runtime.config import default_cache_dir
from runtime.errors import ModelError
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.published import PublishedTensors
from runtime.models.seeing import SEEING
from runtime.models.shards import Shard
from runtime.models.spec import DecoderSpec, ModelSpec
from runtime.models.tensor_files import FLOATS, check_tensor, find_files, locate, open_file

_BAR_FROM_BYTES = 1 << 30
_DIGESTED_BYTES = 1 << 24
# Suffixes of packed experts' tensors, which are stored as bytes.
_BYTES = ("_blocks", "_scales")
# Larger than the number of rows of any matrix.
MOST_ROWS = 1 << 32
# Quantised tensors.
StoredTensors = GGUFTensors | PublishedTensors


def load_weights(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, shard: Shard | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of `spec.expected_tensors()` by name, in `dtype`, on the CPU. Experts in MXFP4 stay packed.

    With a shard, each tensor is this rank's part. Tied models then also get an `lm_head.weight`, because the head is
    sharded but the embedding is not. Peak memory is the result plus one tensor.

    Raises:
        ModelError: if a file is missing or truncated, or a tensor is missing or has a wrong shape or type.
    """
    stored = open_stored(directory, spec)
    if stored is None:
        tensors = _read_tensors(directory, spec, dtype)
    else:
        names = tqdm(spec.expected_tensors(), desc="unpacking", unit="tensor", disable=None)
        tensors = ((name, read_stored(stored, name, _dtype_of(name, spec, dtype))) for name in names)
    weights = {name: tensor if shard is None else shard.cut(name, tensor).clone() for name, tensor in tensors}
    if shard is not None and spec.tie_embeddings:
        weights["lm_head.weight"] = shard.head(weights["model.embed_tokens.weight"]).clone()
    return weights


def open_stored(directory: Path, spec: DecoderSpec) -> StoredTensors | None:
    """The tensors of a GGUF file or of a quantised checkpoint; None: another checkpoint. Raises ModelError."""
    return GGUFTensors.open(directory) or PublishedTensors.open(directory, spec)


def load_vectors(stored: StoredTensors, spec: DecoderSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`load_weights` without matrices.

    Those of the layers are the places of their rows, as `places` gives them; the embeddings and the head are [rows, 0].
    """
    weights = places(spec)
    for name, shape in spec.expected_tensors().items():
        if name not in weights:
            weights[name] = read_stored(stored, name, _dtype_of(name, spec, dtype))
        elif not name.startswith("model.layers."):
            weights[name] = torch.empty(shape[0], 0, dtype=dtype)
    return weights


def runs_of(rows: np.ndarray, names: Sequence[str]) -> list[tuple[str, np.ndarray]]:
    """Runs of rows of one tensor, for places of rows [n]: its name, and the rows' numbers in it."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows // MOST_ROWS)) + 1)
    return [(names[run[0] // MOST_ROWS], run % MOST_ROWS) for run in runs]


def codes_directory(tensors: StoredTensors, path: Path) -> Path:
    """Where the kernels' codes of a model's directory `path` are kept: there if it is in the cache, as GGUF files' is.

    The name changes with the files, so that codes of other weights are not used.
    """
    if isinstance(tensors, GGUFTensors):
        return path
    files = [(file, file.stat()) for file in find_files(path)]
    identity = "\n".join(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}" for file, state in files)
    return default_cache_dir() / "codes" / f"{path.name}-{xxhash.xxh3_64_hexdigest(identity.encode())}"


def places(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """For each matrix but routers, the places of its rows, int64 [rows, 1].

    A place is the number of the tensor in `expected_tensors` times `MOST_ROWS`, plus the row. Code that fuses and
    reorders rows does the same with their places.
    """
    shapes = enumerate(spec.expected_tensors().items())
    return {
        name: torch.arange(shape[0])[:, None] + number * MOST_ROWS
        for number, (name, shape) in shapes
        if len(shape) == 2 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
    }


def read_stored(stored: StoredTensors, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor, unpacked. Raises ModelError if its type is not known."""
    if isinstance(stored, PublishedTensors):
        return stored.read(name, dtype)
    values = torch.from_numpy(stored.values(name).copy())
    if values.dtype == torch.uint16:
        values = values.view({"F16": torch.float16, "BF16": torch.bfloat16}[stored.kind(name)])
    return values.to(dtype)


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
                    yield own, _read(file, path, name, expected[own], _dtype_of(own, spec, dtype))
                    bar.update()


def _dtype_of(name: str, spec: DecoderSpec, dtype: torch.dtype) -> torch.dtype:
    # float32 for small differences between experts' scores, for the decay of states, and for factors 1 + weight.
    wide = name.endswith((".expert_bias", ".A_log", ".dt_bias")) or (spec.centered and name.endswith("norm.weight"))
    return torch.float32 if wide else dtype


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
    if (linked := GGUFTensors.open(directory)) is not None:
        files = [linked.path]
    elif (
        isinstance(spec, DecoderSpec)
        and spec.architecture not in SEEING  # KV also depends on the tower
        and PublishedTensors.open(directory, spec) is None
    ):
        files = sorted(locate(directory, [spec.stored_name(name) for name in spec.expected_tensors()]))
    else:
        files = find_files(directory)
    for path in files:
        with path.open("rb") as file:
            while data := file.read(_DIGESTED_BYTES):
                state.update(data)
    return state.hexdigest()


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
