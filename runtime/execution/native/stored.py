"""Quantised matrices as codes: packed once into a file in the cache, which all engines map."""

import ctypes
import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime.execution.mixers.mixer import Mixer
from runtime.execution.native import library as c
from runtime.execution.native.codes import describe_codes, pack_into
from runtime.execution.native.packed import Team, pack, packed_bytes
from runtime.execution.torch_decoder import TorchDecoder
from runtime.models.publishing import reserve, scratch
from runtime.models.seals import holds, seal
from runtime.models.stored import MOST_ROWS, StoredTensors, places, read_stored, runs_of

log = logging.getLogger(__name__)

# Raised when the layout of codes changes, so that older files are not used.
_LAYOUT = 3


def _seal_of(path: Path) -> Path:
    return path.with_suffix(".seal")


@dataclass(slots=True)
class _Stored:
    """A matrix, the places of its rows in the checkpoint (see `places`), and its own place in the packed file."""

    matrix: c.Matrix
    rows: np.ndarray
    offset: int


@dataclass(slots=True)
class StoredExperts:
    """Matrices of a layer's experts, by expert, and gate over up and down of the shared one, if there is one."""

    gate_up: list[c.Matrix]
    down: list[c.Matrix]
    shared: tuple[c.Matrix, c.Matrix] | None


class StoredMatrices:
    """The matrices of a quantised model.

    Tensors without codes, and gates that are stored otherwise than what they gate, are unpacked.
    """

    def __init__(self, team: Team, model: TorchDecoder, tensors: StoredTensors, directory: Path):
        """Map the packed file in this directory; write it first if there is none.

        `model`: of the weights that `load_vectors` gives.
        """
        spec, dtype = model.spec, model.embedding.dtype
        self._team, self._tensors, self._dtype = team, tensors, dtype
        self._names = list(spec.expected_tensors())
        self._size = 0
        self._inputs = [list(self._plan_inputs(layer.mixer)) for layer in model.layers]
        self._o = [self._plan(layer.o) for layer in model.layers]
        # Layers of experts without a shared one have none.
        mlps = {i: layer for i, layer in enumerate(model.layers) if len(layer.gate_up)}
        self._gate_up = {i: self._plan(layer.gate_up, paired=True) for i, layer in mlps.items()}
        self._down = {i: self._plan(layer.down) for i, layer in mlps.items()}
        experts = {i: layer.experts for i, layer in enumerate(model.layers) if layer.experts is not None}
        self._expert_gate_up = {
            i: [self._plan(one, paired=each.spec.limit is None) for one in each.gate_up] for i, each in experts.items()
        }
        self._expert_down = {i: [self._plan(one) for one in each.down] for i, each in experts.items()}
        every = places(spec)
        self._table = self._head = self._plan(every["model.embed_tokens.weight"])
        if not spec.tie_embeddings:
            self._head = self._plan(every["lm_head.weight"])
        # What is unpacked is stored in the dtype.
        name = f"codes-{team.library.panel}-{str(dtype).removeprefix('torch.')}-{_LAYOUT}.bin"
        self._data = self._open(directory / name)
        for one in self._every():
            one.matrix.data = self._data.ctypes.data + one.offset

    def layer(self, index: int) -> tuple[list[c.Matrix], c.Matrix, c.Matrix, c.Matrix]:
        """Parts of what the mixer reads, side by side; o; gate over up; down. Layers of experts lack the last two."""
        inputs, o = [one.matrix for one in self._inputs[index]], self._o[index].matrix
        if index in self._expert_down:
            return inputs, o, c.Matrix(), c.Matrix()
        return inputs, o, self._gate_up[index].matrix, self._down[index].matrix

    def experts(self, index: int) -> StoredExperts:
        gate_up, down = ([one.matrix for one in each[index]] for each in (self._expert_gate_up, self._expert_down))
        shared = (self._gate_up[index].matrix, self._down[index].matrix) if index in self._down else None
        return StoredExperts(gate_up, down, shared)

    @property
    def head(self) -> c.Matrix:
        return self._head.matrix

    @property
    def table(self) -> c.Matrix:
        """The embeddings."""
        return self._table.matrix

    def _plan_inputs(self, mixer: Mixer) -> Iterator[_Stored]:
        """A part for each run of rows of equal types."""
        assert mixer.inputs is not None
        tensors = (mixer.inputs // MOST_ROWS)[:, 0].tolist()
        for _, run in groupby(range(len(tensors)), lambda row: self._kind(tensors[row])):
            rows = list(run)
            yield self._plan(mixer.inputs[rows[0] : rows[-1] + 1])

    def _kind(self, tensor: int) -> str:
        return self._tensors.kind(self._names[tensor])

    def _plan(self, rows: torch.Tensor, paired: bool = False) -> _Stored:
        """The matrix of rows at these places, int64 [n, 1]."""
        found = rows[:, 0].numpy()
        tensors = np.unique(found // MOST_ROWS).tolist()
        name, kinds = self._names[tensors[0]], {self._kind(tensor) for tensor in tensors}
        n, k = len(found), self._tensors.shape(name)[1]
        if len(kinds) > 1:
            matrix = c.Matrix(n=n, k=k, storage=0, is_paired=paired)
        elif (sample := self._tensors.sample(name)) is not None:
            matrix = describe_codes(sample, n, paired)
        else:
            matrix = c.Matrix(n=n, k=k, storage=int(self._dtype == torch.bfloat16), is_paired=paired)
        stored = _Stored(matrix, found, self._size)
        self._size += packed_bytes(self._team.library, matrix)
        return stored

    def _every(self) -> Iterator[_Stored]:
        for parts in self._inputs:
            yield from parts
        for each in (*self._expert_gate_up.values(), *self._expert_down.values()):
            yield from each
        yield from (*self._o, *self._gate_up.values(), *self._down.values(), self._table)
        if self._head is not self._table:
            yield self._head

    def _open(self, path: Path) -> np.ndarray:
        if not self._is_whole(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with scratch(path.parent, ".packing-") as directory:
                    self._make(directory / path.name)
                    # Map the file of another process that was faster, so that both share its memory.
                    if not self._is_whole(path):
                        _seal_of(directory / path.name).rename(_seal_of(path))
                        (directory / path.name).rename(path)
            except OSError as error:
                log.warning("packed weights stay in memory: cannot write %s: %s", path, error.strerror or error)
                self._write(data := np.frombuffer(mmap.mmap(-1, self._size), np.uint8))
                return data
        return np.memmap(path, np.uint8, "r")

    def _is_whole(self, path: Path) -> bool:
        return path.exists() and path.stat().st_size == self._size and holds(_seal_of(path))

    def _make(self, path: Path) -> None:
        with path.open("wb") as file:
            # A full disk is an error here. At a write to the mapping, it would end the process.
            reserve(file, self._size)
        self._write(data := np.memmap(path, np.uint8, "r+"))
        data.flush()
        seal(_seal_of(path), [path])

    def _write(self, data: np.ndarray) -> None:
        library, every = self._team.library, list(self._every())
        log.info("packing the %d matrices of %s, once", len(every), self._tensors.path)
        for one in tqdm(every, desc=f"packing {self._tensors.path.name}", unit="matrix", disable=None):
            size = library.matrix_bytes(ctypes.byref(one.matrix))
            to = data[one.offset : one.offset + size]
            if one.matrix.storage == c.CODES:
                pack_into(to, one.matrix, self._tensors.reader(runs_of(one.rows, self._names)), library.panel)
            else:
                one.matrix.data = to.ctypes.data
                dtype = torch.bfloat16 if one.matrix.storage else torch.float32
                runs = runs_of(one.rows, self._names)
                weight = [read_stored(self._tensors, name, dtype)[torch.from_numpy(rows)] for name, rows in runs]
                pack(self._team, one.matrix, torch.cat(weight))
