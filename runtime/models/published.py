"""Quantised checkpoints as they are published: the tensors of a linear layer become codes with scales."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from runtime.errors import ModelError
from runtime.models.coded import KERNEL_GROUP, CodedWeight, from_awq, from_gptq, unpacked
from runtime.models.config_json import is_packed, read_json
from runtime.models.ggml import Codes
from runtime.models.quantization import Quantization, Scheme, read_quantization
from runtime.models.spec import DecoderSpec
from runtime.models.tensor_files import FLOATS, TensorFiles

_SCALES = ("F16", "BF16", "F32", "F8_E8M0")
# Suffixes in place of `weight`; without one, the type of `weight` says whether it is quantised.
_CODES = {"awq": "qweight", "gptq": "qweight", "gptq_v2": "qweight", "packed": "weight_packed", "plain": "weight"}


class PublishedTensors:
    """The tensors of a quantised checkpoint, by the names of `DecoderSpec.expected_tensors`.

    Which layers are quantised is read from the tensors, how they are from config.json.

    Attributes:
        name: of the method or format.
        path: the model's directory.
    """

    def __init__(self, directory: Path, spec: DecoderSpec, quantization: Quantization):
        """Raises ModelError if a file is missing or broken."""
        self.path, self.name, self.quantization = directory, quantization.name, quantization
        self._shapes, self._stored_name = spec.expected_tensors(), spec.stored_name
        self._files = TensorFiles(directory)
        self._bits: dict[str, int | None] = {}

    @classmethod
    def open(cls, directory: Path, spec: DecoderSpec) -> "PublishedTensors | None":
        """The tensors of a model's directory; None: they are not quantised, or the experts of gpt-oss are.

        Raises ModelError.
        """
        config = read_json(directory / "config.json")
        quantization = None if is_packed(config) else read_quantization(config)
        return None if quantization is None else cls(directory, spec, quantization)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def kind(self, name: str) -> str:
        """A name of the type that the kernels' codes have; "float": there are no exact ones. Raises ModelError."""
        bits = self._code_bits(name)
        return "float" if bits is None else f"{bits} bits"

    def sample(self, name: str) -> Codes | None:
        """Codes of one row, which show the type but not the numbers; None: there are no exact ones."""
        if (bits := self._code_bits(name)) is None:
            return None
        k = self._shapes[name][1]
        return Codes(bits, np.zeros((1, k), np.uint8), np.zeros((1, k // KERNEL_GROUP), np.float16))

    def reader(self, runs: Iterable[tuple[str, np.ndarray]]) -> Callable[[np.ndarray], Codes]:
        """Reads codes of the rows that runs name one after the other: tensors of one kind, and rows of each."""
        parts = []
        for name, rows in runs:
            weight, bits = self.coded(name), self._code_bits(name)
            assert weight is not None
            assert bits is not None
            parts.append(weight.rows(rows).as_codes(bits))
        codes, scales = (np.concatenate([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        return lambda wanted: Codes(parts[0].bits, codes[wanted], scales[wanted])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a dtype, unpacked. Raises ModelError."""
        if (weight := self.coded(name)) is not None:
            return weight.values().to(dtype)
        return self._files.get(self._stored_name(name), FLOATS, self._shapes[name]).to(dtype, copy=True)

    def count(self) -> tuple[int, int]:
        """Numbers of quantised matrices, and of those that the kernels' codes hold exactly. Raises ModelError."""
        quantised = [name for name in self._shapes if self._quantised(name) is not None]
        return len(quantised), sum(self._code_bits(name) is not None for name in quantised)

    def coded(self, name: str, is_whole: bool = True) -> CodedWeight | None:
        """The weight of a linear layer; None: it is stored as floats. Raises ModelError.

        `is_whole`: otherwise, there are only the first columns of codes, because reading takes longer than the rest.
        """
        if (scheme := self._quantised(name)) is None:
            return None
        module, (n, k) = self._module(name), self._shapes[name]
        group = scheme.blocks[1] or k

        def codes(suffix: str, kind: str, *shape: int) -> torch.Tensor:
            found = self._files.get(f"{module}.{suffix}", (kind,), shape)
            # Codes of several outputs, in the layouts of GPTQ and AWQ, or of inputs are side by side.
            return found if is_whole else found[:1] if suffix == "qweight" else found[:, :1]

        if scheme.layout in ("plain", "packed"):
            return self._compressed(module, scheme, n, k, codes)
        groups, each = -(-k // group), 32 // scheme.bits
        if n % each or k % each:
            raise ModelError(f"{module} is quantised with {self.name}; its shape {[n, k]} is no multiple of {each}")
        qzeros = self._files.get(f"{module}.qzeros", ("I32",), (groups, n // each))
        scales = self._files.get(f"{module}.scales", _SCALES, (groups, n))
        if scheme.layout == "awq":
            return from_awq(codes("qweight", "I32", k, n // each), qzeros, scales, group)
        offset = 1 if scheme.layout == "gptq" else 0
        weight = from_gptq(codes("qweight", "I32", k // each, n), qzeros, scales, group, scheme.bits, offset)
        weight.order = self._order(f"{module}.g_idx", k, group)
        return weight

    def _compressed(
        self, module: str, scheme: Scheme, n: int, k: int, codes: Callable[..., torch.Tensor]
    ) -> CodedWeight:
        """A weight of compressed-tensors, or in FP8."""
        rows, columns = scheme.blocks[0] or n, scheme.blocks[1] or k
        shape = math.ceil(n / rows), math.ceil(k / columns)
        inverse = f"{module}.weight_scale_inv"  # DeepSeek's name of the scale
        scales = self._scales(inverse if inverse in self._files else f"{module}.weight_scale", shape)
        if scheme.is_float:
            return CodedWeight(8, codes("weight", "F8_E4M3", n, k), scales, (rows, columns))
        each, middle = 32 // scheme.bits, 2 ** (scheme.bits - 1)
        if scheme.layout == "packed":
            found = unpacked(codes("weight_packed", "I32", n, -(-k // each)), scheme.bits)[:, :k]
        else:
            found = codes("weight", "I8", n, k).view(torch.uint8) ^ 128
        zeros = torch.full((1, 1), middle, dtype=torch.int16)
        if (name := f"{module}.weight_zero_point") in self._files:
            if self._files.kind(name) == "I32":  # packed along the outputs
                packed = self._files.get(name, ("I32",), (-(-n // each), shape[1]))
                zeros = unpacked(packed.t(), scheme.bits)[:, :n].t().short()
            else:
                zeros = self._files.get(name, ("I8",), *_spellings(shape)).view(shape).short() + middle
        zeros = zeros.expand(n, shape[1]) if len(zeros) == 1 else zeros.repeat_interleave(-(-n // len(zeros)), 0)[:n]
        order = self._order(f"{module}.weight_g_idx", k, columns)
        return CodedWeight(scheme.bits, found, scales, (rows, columns), zeros, order)

    def _scales(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self._files.get(name, _SCALES, *_spellings(shape)).view(shape)

    def _order(self, name: str, k: int, group: int) -> torch.Tensor | None:
        """The group of each column, int64 [k]; None: neighbours are a group. Raises ModelError."""
        if name not in self._files:
            return None
        order = self._files.get(name, ("I32", "I64"), (k,)).long()
        if not 0 <= int(order.min()) <= int(order.max()) < -(-k // group):
            raise ModelError(
                f"{self._files.where[name]}: {name} has a group {int(order.max())}; there are {-(-k // group)}"
            )
        return None if torch.equal(order, torch.arange(k) // group) else order

    def _module(self, name: str) -> str:
        return self._stored_name(name).removesuffix(".weight")

    def _quantised(self, name: str) -> Scheme | None:
        """The scheme of a tensor; None: it is stored as floats. Raises ModelError."""
        if not name.endswith(".weight") or len(self._shapes[name]) != 2:
            return None
        module = self._module(name)
        scheme = self.quantization.scheme(module)
        suffix = "weight" if scheme is None else _CODES[scheme.layout]
        found = f"{module}.{suffix}"
        if found not in self._files or (suffix == "weight" and self._files.kind(found) in FLOATS):
            return None  # of a layer that is not quantised, or missing
        if scheme is None:
            raise ModelError(f"{self._files.where[found]}: {found} is quantised, but config.json does not say how")
        return scheme

    def _code_bits(self, name: str) -> int | None:
        if not self.quantization.has_integers:
            return None
        if name not in self._bits:
            weight = self.coded(name, is_whole=False)
            self._bits[name] = None if weight is None else weight.code_bits(self._shapes[name][1])
        return self._bits[name]


def _spellings(shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales [rows, columns] may be stored in: without dimensions of size 1."""
    shorter = ((shape[0],),) if shape[1] == 1 else ()
    return (shape, *shorter, ()) if shape == (1, 1) else (shape, *shorter)
