"""Tensors from safetensors files, checked against what the model needs before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from runtime.errors import ModelError
from runtime.models.spec import ModelSpec, read_json

_BAR_FROM_BYTES = 1 << 30


def load_weights(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of `spec.expected_tensors()` in `dtype`, on the CPU.

    Raises:
        ModelError: if a file is missing or cut short, or a tensor is missing or of another shape.
    """
    expected = spec.expected_tensors()
    files = _locate(directory, expected)
    total = sum(path.stat().st_size for path in files)
    weights: dict[str, torch.Tensor] = {}
    with tqdm(total=len(expected), desc="loading", unit="tensor", disable=None if total >= _BAR_FROM_BYTES else True) as bar:
        for path, names in files.items():
            with _open(path) as file:
                for name in names:
                    tensor = file.get_tensor(name)
                    if tuple(tensor.shape) != expected[name]:
                        raise ModelError(
                            f"{path.name}: {name} has shape {list(tensor.shape)}; config.json asks for {list(expected[name])}"
                        )
                    # The clone of an unconverted tensor lets go of the file's mapping.
                    weights[name] = tensor.clone() if tensor.dtype == dtype else tensor.to(dtype)
                    bar.update()
    return weights


def _locate(directory: Path, expected: dict[str, tuple[int, ...]]) -> dict[Path, list[str]]:
    """Which file holds which of the expected tensors."""
    where = _read_index(directory) or _scan(directory)
    missing = [name for name in expected if name not in where]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the checkpoint in {directory} has no tensor {missing[0]}{more}; it has {len(where)} tensors")
    files: dict[Path, list[str]] = {}
    for name in expected:
        files.setdefault(where[name], []).append(name)
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} is missing, although the index of the checkpoint names it")
    return files


def _read_index(directory: Path) -> dict[str, Path] | None:
    path = directory / "model.safetensors.index.json"
    if not path.exists():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{path} has no weight_map")
    for file in weight_map.values():
        if Path(file).name != file:
            raise ModelError(f"{path} names the file {file!r}, which is not in the model's directory")
    return {name: directory / file for name, file in weight_map.items()}


def _scan(directory: Path) -> dict[str, Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
        hint = f"; {others[0]} is a pickle, which Ramet never loads" if others else ""
        raise ModelError(f"no safetensors file in {directory}{hint}")
    found: dict[str, Path] = {}
    for path in files:
        with _open(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}") from None
