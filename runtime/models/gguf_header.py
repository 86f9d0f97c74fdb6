"""Checks of a GGUF file's counts, before a reader makes objects of them: a kilobyte may promise billions."""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from runtime.errors import ModelError

# Bytes of a value by GGUF's number of its type; 8 is a text, 9 an array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
# Most values and texts of all arrays, of which the reader makes an object each, with a kilobyte for a text. The largest
# tokenizers have a quarter of a million tokens, and twice as many merges.
_MOST_VALUES, _MOST_TEXTS = 1 << 21, 1 << 20
# Most fields, most tensors, and most dimensions of a tensor.
_MOST_FIELDS, _MOST_TENSORS, _MOST_DIMENSIONS = 1 << 12, 1 << 17, 4


class _Walk:
    """Reads a header from its beginning. Raises ValueError and struct.error for one that does not fit its file."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at = data, 4
        self._values = self._texts = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise ValueError("its header is longer than the file")

    def texts(self, count: int) -> None:
        data, at, length = self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length(data, at)[0]
        self.skip(at - self._at)

    def value(self, kind: int) -> None:
        if kind == _TEXT:
            self.texts(1)
        elif kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == _ARRAY:
                raise ValueError("it has an array of arrays")
            self._values += count
            self._texts += count if kind == _TEXT else 0
            if self._values > _MOST_VALUES or self._texts > _MOST_TEXTS:
                raise ValueError(f"its arrays have more than {_MOST_VALUES} values, or {_MOST_TEXTS} texts")
            if kind == _TEXT:
                self.texts(count)
            else:
                self.skip(count * _size(kind))
        else:
            self.skip(_size(kind))

    def check(self) -> None:
        self.number("I")  # the version
        tensors, fields = self.number("Q"), self.number("Q")
        if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
            raise ValueError(f"it has {tensors} tensors and {fields} fields")
        for _ in range(fields):
            self.texts(1)
            self.value(self.number("I"))
        ends = [self._tensor() for _ in range(tensors)]
        if max(ends, default=0) > len(self._data) - self._at:
            raise ValueError("its tensors are longer than the file")

    def _tensor(self) -> int:
        """The end of a tensor, in bytes from the first one."""
        import gguf

        self.texts(1)
        if (dimensions := self.number("I")) > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        values = math.prod([self.number("Q") for _ in range(dimensions)])
        kind, offset = self.number("I"), self.number("Q")
        per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        return offset + values // per_block * size


def _size(kind: int) -> int:
    if kind not in _SIZES:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _SIZES[kind]


def check_header(path: Path) -> None:
    """Raise ModelError if a little-endian GGUF file promises more than it has."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _Walk(data).check()
        except (ValueError, struct.error, OverflowError) as error:
            raise ModelError(f"{path} is truncated, or not a readable GGUF file: {error}") from None


def check_counts(path: Path, metadata: dict[str, Any], tensors: list[Any]) -> None:
    """Raise ModelError for numbers of layers and experts that the tensors cannot have."""
    largest = max((int(size) for tensor in tensors for size in tensor.shape), default=0)
    layers = 0
    for name, most in (("block_count", len(tensors)), ("expert_count", largest), ("nextn_predict_layers", -1)):
        found = metadata.get(f"{metadata.get('general.architecture')}.{name}", 0)
        most = layers - 1 if most < 0 else most
        if type(found) is not int or (found and not 0 < found <= most):
            raise ModelError(f"{path.name}: {name} is {str(found)[:40]}; its tensors allow {max(most, 0)}")
        layers = layers or found
