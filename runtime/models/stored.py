"""Weights as they are stored: the quantised tensors of a GGUF file, or of a published checkpoint."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from tqdm import tqdm

from runtime.config import default_cache_dir
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.published import PublishedTensors
from runtime.models.spec import DecoderSpec
from runtime.models.tensor_files import dtype_of, find_files

# Larger than the number of rows of any matrix.
MOST_ROWS = 1 << 32
StoredTensors = GGUFTensors | PublishedTensors


def open_stored(directory: Path, spec: DecoderSpec) -> StoredTensors:
    """The tensors of a directory that `holds_codes`. Raises ModelError."""
    stored = GGUFTensors.open(directory) or PublishedTensors.open(directory, spec)
    assert stored is not None
    return stored


def unpack(directory: Path, spec: DecoderSpec, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a directory that `holds_codes`, unpacked. Raises ModelError."""
    stored = open_stored(directory, spec)
    for name in tqdm(spec.expected_tensors(), desc="unpacking", unit="tensor", disable=None):
        yield name, read_stored(stored, name, dtype_of(name, spec, dtype))


def load_vectors(stored: StoredTensors, spec: DecoderSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`load_weights` without matrices.

    Those of the layers are the places of their rows, as `places` gives them; the embeddings and the head are [rows, 0].
    """
    weights = places(spec)
    for name, shape in spec.expected_tensors().items():
        if name not in weights:
            weights[name] = read_stored(stored, name, dtype_of(name, spec, dtype))
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
