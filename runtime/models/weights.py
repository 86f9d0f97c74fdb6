"""Weights from safetensors files, checked against the model's spec."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from runtime.errors import ModelError
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.shards import Shard
from runtime.models.spec import LlamaSpec, ModelSpec

_BAR_FROM_BYTES = 1 << 30
_DIGESTED_BYTES = 1 << 24
# Supported types. Others (float8, integers) are quantised and would need scales.
_DTYPES = ("F32", "BF16", "F16", "F64")
# Suffixes of packed experts' tensors, which are stored as bytes.
_BYTES = ("_blocks", "_scales")
# Larger than the number of rows of any matrix.
MOST_ROWS = 1 << 32
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def load_weights(
    directory: Path, spec: LlamaSpec, dtype: torch.dtype, shard: Shard | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of `spec.expected_tensors()` by name, in `dtype`, on the CPU. Packed tensors stay packed.

    With a shard, each tensor is this rank's part. Tied models then also get an `lm_head.weight`, because the head is
    sharded but the embedding is not. Peak memory is the result plus one tensor.

    Raises:
        ModelError: if a file is missing or truncated, or a tensor is missing or has a wrong shape or type.
    """
    linked = GGUFTensors.open(directory)
    if linked is None:
        tensors = _read_tensors(directory, spec, dtype)
    else:
        tensors = ((n, read_linked(linked, n, _dtype_of(n, spec, dtype))) for n in spec.expected_tensors())
    weights = {name: tensor if shard is None else shard.cut(name, tensor).clone() for name, tensor in tensors}
    if shard is not None and spec.tie_embeddings:
        weights["lm_head.weight"] = shard.head(weights["model.embed_tokens.weight"]).clone()
    return weights


def load_vectors(linked: GGUFTensors, spec: LlamaSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`load_weights` of a GGUF file without its matrices.

    Those of the layers are the places of their rows, as `places` gives them; the embeddings and the head are [rows, 0].
    """
    weights = places(spec)
    for name, shape in spec.expected_tensors().items():
        if name not in weights:
            weights[name] = read_linked(linked, name, _dtype_of(name, spec, dtype))
        elif not name.startswith("model.layers."):
            weights[name] = torch.empty(shape[0], 0, dtype=dtype)
    return weights


def places(spec: LlamaSpec) -> dict[str, torch.Tensor]:
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


def read_linked(linked: GGUFTensors, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a GGUF file. Raises ModelError if its type is not known."""
    values = torch.from_numpy(linked.values(name).copy())
    if values.dtype == torch.uint16:
        values = values.view({"F16": torch.float16, "BF16": torch.bfloat16}[linked.kind(name)])
    return values.to(dtype)


def _read_tensors(directory: Path, spec: LlamaSpec, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    expected = spec.expected_tensors()
    names = {spec.stored_name(name): name for name in expected}
    files = _locate(directory, list(names))
    total = sum(path.stat().st_size for path in files)
    # None: tqdm shows its bar on terminals only.
    disable = None if total >= _BAR_FROM_BYTES else True
    with tqdm(total=len(expected), desc="loading", unit="tensor", disable=disable) as bar:
        for path, stored in files.items():
            with _open(path) as file:
                for name in stored:
                    own = names[name]
                    yield own, _read(file, path, name, expected[own], _dtype_of(own, spec, dtype))
                    bar.update()


def _dtype_of(name: str, spec: LlamaSpec, dtype: torch.dtype) -> torch.dtype:
    # float32 for small differences between experts' scores, for the decay of states, and for factors 1 + weight.
    wide = name.endswith((".expert_bias", ".A_log", ".dt_bias")) or (spec.centered and name.endswith("norm.weight"))
    return torch.float32 if wide else dtype


def find_weights(directory: Path) -> list[Path]:
    """All safetensors files of a model. Raises ModelError if there are none, or a tensor is float8."""
    files = _find(directory)
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                if (kind := file.get_slice(name).get_dtype()).startswith("F8"):
                    raise ModelError(f"{path}: {name} is stored as {kind}; supported are {', '.join(_DTYPES)}")
    return files


def digest_weights(directory: Path, spec: ModelSpec) -> str:
    """A digest of the contents of all files with the model's weights. Raises ModelError."""
    state = xxhash.xxh3_128()
    if (linked := GGUFTensors.open(directory)) is not None:
        files = [linked.path]
    elif isinstance(spec, LlamaSpec):
        files = sorted(_locate(directory, [spec.stored_name(name) for name in spec.expected_tensors()]))
    else:
        files = find_weights(directory)
    for path in files:
        with path.open("rb") as file:
            while data := file.read(_DIGESTED_BYTES):
                state.update(data)
    return state.hexdigest()


def random_weights(
    spec: LlamaSpec, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
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
    if tuple(stored.get_shape()) != shape:
        raise ModelError(f"{path}: {name} has shape {stored.get_shape()}; config.json requires {list(shape)}")
    supported = ("U8",) if name.endswith(_BYTES) else _DTYPES
    if stored.get_dtype() not in supported:
        raise ModelError(f"{path}: {name} is stored as {stored.get_dtype()}; supported are {', '.join(supported)}")
    tensor = file.get_tensor(name)
    if name.endswith(_BYTES):
        dtype = torch.uint8
    # Clone a tensor that needs no conversion, because it would keep the file mapped.
    return tensor.clone() if tensor.dtype == dtype else tensor.to(dtype)


def _locate(directory: Path, expected: list[str]) -> dict[Path, list[str]]:
    """The expected tensors' names by file. Raises ModelError if one is missing."""
    where: dict[str, Path] = {}
    for path in _find(directory):
        with _open(path) as file:
            where.update(dict.fromkeys(file.keys(), path))
    if missing := [name for name in expected if name not in where]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"the checkpoint in {directory} has no tensor {missing[0]}{more}; "
            f"config.json requires {len(expected)} tensors, the files hold {len(where)}"
        )
    files: dict[Path, list[str]] = {}
    for name in expected:
        files.setdefault(where[name], []).append(name)
    return files


def _find(directory: Path) -> list[Path]:
    single = directory / "model.safetensors"
    if single.exists():
        # Other safetensors files in this directory are variants or adapters.
        return [single]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
        hint = f"; {pickles[0]} is a pickle, which Ramet never loads: convert it to safetensors" if pickles else ""
        raise ModelError(f"no safetensors file in {directory}{hint}")
    return files


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a complete safetensors file: {error}") from None
