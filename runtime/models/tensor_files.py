"""Safetensors files of a model directory."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError
from runtime.models.spec import DecoderSpec

# Supported types. Others (float8, integers) are quantised and need scales.
FLOATS = ("F32", "BF16", "F16", "F64")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class TensorFiles:
    """The tensors of all files, by name."""

    def __init__(self, directory: Path):
        """Raises ModelError if there are no files, or one is broken."""
        self.directory = directory
        self.where: dict[str, Path] = {}
        self._opened: dict[Path, safe_open] = {}
        for path in find_files(directory):
            self._opened[path] = file = open_file(path)
            self.where.update(dict.fromkeys(file.keys(), path))

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def kind(self, name: str) -> str:
        """Safetensors' name of a tensor's type."""
        return str(self._opened[self.where[name]].get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened[self.where[name]].get_slice(name).get_shape())

    def get(self, name: str, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> torch.Tensor:
        """A tensor as stored. Raises ModelError if it is missing, or its type or shape is none of these."""
        if (path := self.where.get(name)) is None:
            raise ModelError(f"the checkpoint in {self.directory} has no tensor {name}")
        check_tensor(path, name, self.kind(name), self.shape(name), kinds, *shapes)
        return self._opened[path].get_tensor(name)


def check_tensor(
    path: Path, name: str, kind: str, shape: tuple[int, ...], kinds: tuple[str, ...], *shapes: tuple[int, ...]
) -> None:
    """Raise ModelError if the type or the shape is none of these."""
    if shape not in shapes:
        wanted = " or ".join(str(list(one)) for one in shapes)
        raise ModelError(f"{path}: {name} has shape {list(shape)}; config.json requires {wanted}")
    if kind not in kinds:
        raise ModelError(f"{path}: {name} is stored as {kind}; supported are {', '.join(kinds)}")


def dtype_of(name: str, spec: DecoderSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor of a model in `dtype`."""
    # float32 for small differences between experts' scores, for the decay of states, and for factors 1 + weight.
    wide = name.endswith((".expert_bias", ".A_log", ".dt_bias")) or (spec.centered and name.endswith("norm.weight"))
    return torch.float32 if wide else dtype


def locate(directory: Path, expected: list[str]) -> dict[Path, list[str]]:
    """The expected tensors' names by file. Raises ModelError if one is missing."""
    where = TensorFiles(directory).where
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


def find_files(directory: Path) -> list[Path]:
    """The paths of the files with the weights. Raises ModelError if there are none."""
    single = directory / "model.safetensors"
    if single.exists():
        # Other safetensors files in this directory are variants or adapters.
        return [single]
    # Not macOS's notes about files on others' volumes (`._model.safetensors`).
    files = sorted(directory.glob("[!.]*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
        hint = f"; {pickles[0]} is a pickle, which Ramet never loads: convert it to safetensors" if pickles else ""
        raise ModelError(f"no safetensors file in {directory}{hint}")
    return files


def open_file(path: Path) -> safe_open:
    """Open a file. Raises ModelError."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a complete safetensors file: {error}") from None
