"""The matrices of a GGUF file as codes: packed once into a file beside the model, which all engines map."""

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime.execution.native import library as c
from runtime.execution.native.codes import describe_codes, pack_into
from runtime.execution.native.packed import Team, pack, packed_bytes
from runtime.models.ggml import Codes, can_decode, decode
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.publishing import scratch
from runtime.models.spec import LlamaSpec
from runtime.models.weights import read_linked

log = logging.getLogger(__name__)

# Raised when the layout of codes changes, so that older files are not used.
_LAYOUT = 2


@dataclass(slots=True)
class _Stored:
    """A matrix, the tensors whose rows it has, and its place in the file."""

    matrix: c.Matrix
    tensors: list[str]
    offset: int


class StoredMatrices:
    """The matrices of a GGUF file's model.

    Tensors of types without codes, and gates that are stored otherwise than what they gate, are unpacked.
    """

    def __init__(self, team: Team, spec: LlamaSpec, dtype: torch.dtype, linked: GGUFTensors, directory: Path):
        """Map the packed file in the model's directory; write it first if there is none."""
        self._team, self._linked, self._dtype = team, linked, dtype
        self._size = 0
        layers = range(spec.num_layers)
        self._qkv = [list(self._plan_qkv(f"model.layers.{i}.self_attn.")) for i in layers]
        self._o = [self._plan([f"model.layers.{i}.self_attn.o_proj.weight"]) for i in layers]
        gates = [[f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up")] for i in layers]
        self._gate_up = [self._plan(names, paired=True) for names in gates]
        self._down = [self._plan([f"model.layers.{i}.mlp.down_proj.weight"]) for i in layers]
        table = self._plan(["model.embed_tokens.weight"])
        self._table = table
        self._head = table if spec.tie_embeddings else self._plan(["lm_head.weight"])
        # What is unpacked is stored in the dtype.
        name = f"codes-{team.library.panel}-{str(dtype).removeprefix('torch.')}-{_LAYOUT}.bin"
        self._data = self._open(directory / name)
        for one in self._every():
            one.matrix.data = self._data.ctypes.data + one.offset

    def layer(self, index: int) -> tuple[list[c.Matrix], c.Matrix, c.Matrix, c.Matrix]:
        """Parts of q, k, v side by side; o; gate over up; down."""
        qkv = [one.matrix for one in self._qkv[index]]
        return qkv, self._o[index].matrix, self._gate_up[index].matrix, self._down[index].matrix

    @property
    def head(self) -> c.Matrix:
        return self._head.matrix

    @property
    def table(self) -> c.Matrix:
        """The embeddings."""
        return self._table.matrix

    def _plan_qkv(self, prefix: str) -> Iterator[_Stored]:
        """A part for each run of equal types."""
        names = [f"{prefix}{name}_proj.weight" for name in "qkv"]
        while names:
            run = 1
            while run < len(names) and self._linked.kind(names[run]) == self._linked.kind(names[0]):
                run += 1
            yield self._plan(names[:run])
            del names[:run]

    def _plan(self, names: list[str], paired: bool = False) -> _Stored:
        linked = self._linked
        kinds = [linked.kind(name) for name in names]
        n, k = sum(linked.shape(name)[0] for name in names), linked.shape(names[0])[1]
        if len(set(kinds)) > 1:
            matrix = c.Matrix(n=n, k=k, storage=0, is_paired=paired)
        elif can_decode(kinds[0]):
            matrix = describe_codes(decode(linked.blocks(names[0])[:1], kinds[0]), n, paired)
        else:
            matrix = c.Matrix(n=n, k=k, storage=int(self._dtype == torch.bfloat16), is_paired=paired)
        stored = _Stored(matrix, names, self._size)
        self._size += packed_bytes(self._team.library, matrix)
        return stored

    def _every(self) -> Iterator[_Stored]:
        for parts in self._qkv:
            yield from parts
        yield from (*self._o, *self._gate_up, *self._down, self._table)
        if self._head is not self._table:
            yield self._head

    def _open(self, path: Path) -> np.ndarray:
        if not self._is_whole(path):
            try:
                with scratch(path.parent, ".packing-") as directory:
                    self._make(directory / path.name)
                    # Map the file of another process that was faster, so that both share its memory.
                    if not self._is_whole(path):
                        (directory / path.name).rename(path)
            except OSError as error:
                log.warning("packed weights stay in memory: cannot write %s: %s", path, error.strerror or error)
                self._write(data := np.frombuffer(mmap.mmap(-1, self._size), np.uint8))
                return data
        return np.memmap(path, np.uint8, "r")

    def _is_whole(self, path: Path) -> bool:
        return path.exists() and path.stat().st_size == self._size

    def _make(self, path: Path) -> None:
        with path.open("wb") as file:
            # A full disk is an error here. At a write to the mapping, it would end the process.
            os.posix_fallocate(file.fileno(), 0, self._size)
        self._write(data := np.memmap(path, np.uint8, "r+"))
        data.flush()

    def _write(self, data: np.ndarray) -> None:
        library, every = self._team.library, list(self._every())
        for one in tqdm(every, desc=f"packing {self._linked.path.name}", unit="matrix", disable=None):
            size = library.matrix_bytes(ctypes.byref(one.matrix))
            to = data[one.offset : one.offset + size]
            if one.matrix.storage == c.CODES:
                pack_into(to, one.matrix, self._reader(one.tensors), library.panel)
            else:
                one.matrix.data = to.ctypes.data
                dtype = torch.bfloat16 if one.matrix.storage else torch.float32
                weight = torch.cat([read_linked(self._linked, name, dtype) for name in one.tensors])
                pack(self._team, one.matrix, weight)

    def _reader(self, names: list[str]) -> Callable[[np.ndarray], Codes]:
        """The codes of some rows of tensors of one type."""
        blocks, kind = np.concatenate([self._linked.blocks(name) for name in names]), self._linked.kind(names[0])
        return lambda rows: decode(blocks[rows], kind)
