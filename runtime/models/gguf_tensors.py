"""The tensors of a GGUF file by their Hugging Face names."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import ModelError
from runtime.models.config_json import GGUF_LINK
from runtime.models.ggml import Codes, can_decode, decode
from runtime.models.gguf_header import check_counts, check_header
from runtime.models.spec import DecoderSpec

# Tensor with the divisors of Llama 3's rotary frequencies, which config.json describes by `rope_scaling`.
ROPE_FACTORS = "rope_freqs.weight"
# An expert's number in a name, and what stands before it.
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.")
# The number of a part, and of all parts, at the end of a file's name.
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
# The types that a conversion keeps: safetensors' name, and bytes per value.
_FLOATS = {"F16": ("F16", 2), "BF16": ("BF16", 2)}


def is_gguf(path: Path) -> bool:
    """Whether a file's content is GGUF, whatever its name. False for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def name_without_part(path: Path) -> str:
    """The name of a GGUF file without its suffix, and without the number of its part."""
    return _PART.sub("", path.stem)


def parts_of(path: Path) -> list[Path]:
    """All parts of the model that a file is a part of, as its name says; the file itself if it is whole."""
    if (found := _PART.search(path.stem)) is None:
        return [path]
    count = int(found[2])
    return [path.with_name(f"{name_without_part(path)}-{i:05}-of-{count:05}{path.suffix}") for i in range(1, count + 1)]


def read_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Metadata and tensors of a file, or of all files that it is a part of. Raises ModelError.

    The offsets of tensors count through all parts as if they were one file.
    """
    parts = parts_of(path)
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelError(f"{path} is one of {len(parts)} parts, and {missing[0]} is missing beside it")
    metadata, tensors = _read_one(parts[0])
    if (count := metadata.get("split.count", 1)) != len(parts):
        raise ModelError(f"{path} is one of {count} parts; the names of parts must end like -00001-of-00003.gguf")
    offset = parts[0].stat().st_size
    for part in parts[1:]:
        tensors += [tensor._replace(data_offset=tensor.data_offset + offset) for tensor in _read_one(part)[1]]
        offset += part.stat().st_size
    check_counts(path, metadata, tensors)
    return metadata, tensors


def _read_one(path: Path) -> tuple[dict[str, Any], list[Any]]:
    import gguf

    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file")
            version = file.read(4)
        if version[:2] != b"\0\0":  # else big-endian
            check_header(path)
        reader = gguf.GGUFReader(path)
        if reader.byte_order != "I" or sys.byteorder != "little":
            raise ModelError(f"{path} is a big-endian GGUF file; supported are little-endian ones")
        # Large arrays are decoded once here; the reader's accessor of a single element is quadratic.
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except ModelError:
        raise
    except Exception as error:  # the reader has no exception type: a truncated file raises almost anything
        raise ModelError(f"{path} is truncated, or not a readable GGUF file: {error}") from None
    return metadata, reader.tensors


class GGUFTensors:
    """The tensors of a model in a GGUF file, in the order of `DecoderSpec.expected_tensors`.

    `tensors`: by Hugging Face name: GGUF's name of the type, the shape, and the offset (see `read_gguf`).
    """

    name = "gguf"

    def __init__(self, path: Path, tensors: dict[str, list[Any]], heads: dict[str, int], norm_offset: float):
        self.path, self._tensors, self._heads, self._norm_offset = path, tensors, heads, norm_offset
        self._files = [np.memmap(part, np.uint8, "r") for part in parts_of(path)]

    @classmethod
    def named(cls, path: Path, tensors: list[Any], architecture: str, spec: DecoderSpec) -> "GGUFTensors":
        """The tensors of a reader. Raises ModelError if names or shapes do not fit the model."""
        import gguf

        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper().replace("-", "_")], spec.num_layers)
        stored = {tensor.name: tensor for tensor in tensors if tensor.name != ROPE_FACTORS}
        used: set[str] = set()
        table: dict[str, list[Any]] = {}
        for name, shape in spec.expected_tensors().items():
            # The experts of a layer are one tensor in the file.
            whole, number = _EXPERT.sub(r"\1.", spec.stored_name(name)), _EXPERT.search(name)
            if (tensor := stored.get(_stored_name(whole, names))) is None:
                raise ModelError(f"{path.name} has no tensor for {name}, which its metadata requires")
            used.add(tensor.name)
            found = [int(size) for size in reversed(tensor.shape)]
            offset = int(tensor.data_offset)
            if number is not None and int(number[2]) < found[0]:
                offset += int(number[2]) * int(tensor.n_bytes) // found.pop(0)
            # Dimensions of size 1 are left out in the file.
            if [size for size in found if size > 1] != [size for size in shape if size > 1]:
                raise ModelError(f"{path.name}: {tensor.name} has shape {found}; expected is {list(shape)}")
            table[name] = [tensor.tensor_type.name, list(shape), offset]
        if others := [name for name in stored if name not in used]:
            raise ModelError(f"{path.name} has a tensor {others[0]}, which this model does not use")
        # llama.cpp stores Llama's queries and keys for interleaved rotation.
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if architecture == "llama" else {}
        # Its norms of Gemma have the 1 that the model adds.
        return cls(path, table, heads, 1.0 if spec.centered else 0.0)

    @classmethod
    def open(cls, directory: Path) -> "GGUFTensors | None":
        """The tensors of the file that a model's directory was made of; None: it holds its own. Raises ModelError."""
        if not (link := directory / GGUF_LINK).exists():
            return None
        found = json.loads(link.read_text("utf-8"))
        try:
            return cls(Path(found["path"]), found["tensors"], found["heads"], found["norm_offset"])
        except OSError as error:
            raise ModelError(f"cannot read {found['path']}: {error.strerror or error}") from None

    def link(self, directory: Path) -> None:
        """Let `open` find the tensors without reading the file's metadata, which takes seconds."""
        # The target of a symbolic link need not have the name of a part.
        path = self.path.resolve() if len(self._files) == 1 else self.path.absolute()
        found = {
            "path": str(path),
            "tensors": self._tensors,
            "heads": self._heads,
            "norm_offset": self._norm_offset,
        }
        (directory / GGUF_LINK).write_text(json.dumps(found), encoding="utf-8")

    def kind(self, name: str) -> str:
        """GGUF's name of a tensor's type."""
        return self._tensors[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1])

    def blocks(self, name: str) -> np.ndarray:
        """uint8 [rows, bytes of a row] as stored, in Hugging Face's order of rows; a vector has one for each number."""
        import gguf

        kind, shape, offset = self._tensors[name]
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        width = math.prod(shape[1:]) // values * size
        file = 0
        while offset >= len(self._files[file]):
            offset, file = offset - len(self._files[file]), file + 1
        rows = self._files[file][offset : offset + shape[0] * width].reshape(-1, width)
        if (heads := self._heads.get(name.split(".")[-2])) is None:
            return rows
        # In the order for rotation by halves.
        return rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    def sample(self, name: str) -> Codes | None:
        """The codes of one row; None: the type has none."""
        kind = self.kind(name)
        return decode(self.blocks(name)[:1], kind) if can_decode(kind) else None

    def reader(self, runs: Iterable[tuple[str, np.ndarray]]) -> Callable[[np.ndarray], Codes]:
        """Reads codes of the rows that runs name one after the other: tensors of one type, and rows of each."""
        runs = list(runs)
        kind, blocks = self.kind(runs[0][0]), np.concatenate([self.blocks(name)[rows] for name, rows in runs])
        return lambda wanted: decode(blocks[wanted], kind)

    def values(self, name: str) -> np.ndarray:
        """The values of a tensor as float32, or as uint16 words of a 16-bit type, in its own shape."""
        import gguf

        kind, shape, _ = self._tensors[name]
        blocks = np.ascontiguousarray(self.blocks(name))
        if kind in _FLOATS:
            return blocks.view(np.uint16).reshape(shape)
        try:
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        except (NotImplementedError, KeyError):
            raise ModelError(f"{self.path.name}: {name} has quantisation {kind}; it is not supported") from None
        values = values.astype(np.float32, copy=False).reshape(shape)
        if name.endswith(".A_log"):
            return np.log(-values)  # the file has -exp of it
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return values - self._norm_offset if self._norm_offset and is_norm else values

    def write(self, target: Path, rounded: bool = False) -> None:
        """Write a safetensors file, one tensor at a time; the library's writer needs all of them in memory.

        `rounded`: quantised tensors become bfloat16 instead of float32, which is not exact.
        """
        from tqdm import tqdm

        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, parts in self._wholes().items():
            kind, shape, _ = self._tensors[parts[0]]
            if len(parts) > 1:
                shape = [*shape[:-2], sum(self._tensors[part][1][-2] for part in parts), shape[-1]]
            dtype, size = ("BF16", 2) if rounded and kind not in _FLOATS else _FLOATS.get(kind, ("F32", 4))
            begin, end = end, end + math.prod(shape) * size
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with target.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for parts in tqdm(
                self._wholes().values(), desc=f"converting {self.path.name}", unit="tensor", disable=None
            ):
                values = self.values(parts[0])
                if len(parts) > 1:
                    values = np.concatenate([self.values(part) for part in parts], axis=-2)
                is_float = self._tensors[parts[0]][0] in _FLOATS
                file.write((_round(values) if rounded and not is_float else values).data)

    def _wholes(self) -> dict[str, list[str]]:
        """The parts, side by side, of each tensor of the checkpoint: `name:0` and `name:1`, or the tensor itself.

        Raises ModelError if parts have different types, one of them of 16 bits.
        """
        wholes: dict[str, list[str]] = {}
        for name in sorted(self._tensors):
            wholes.setdefault(name.partition(":")[0], []).append(name)
        for name, parts in wholes.items():
            if len(kinds := {self._tensors[part][0] for part in parts}) > 1 and kinds & _FLOATS.keys():
                raise ModelError(f"{self.path.name}: the parts of {name} have the types {', '.join(sorted(kinds))}")
        return wholes


def _stored_name(name: str, names: Any) -> str:
    """The name in the file of a tensor of a checkpoint. `names`: the gguf package's table of modules."""
    if name.endswith(".A_log"):
        return str(names[name])  # without a suffix
    module, kind = name.replace(".dt_bias", ".dt_proj.bias").replace(".sinks", ".sinks.weight").rsplit(".", 1)
    return f"{names[module]}.{kind}"


def _round(values: np.ndarray) -> np.ndarray:
    """float32 as the bits of bfloat16, uint16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
