"""The compiled kernels for ctypes: entry points (`src/api.h`) and structures (the other headers)."""

from __future__ import annotations

import ctypes
import platform
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

# Of this kind of processor, best first. Each has its own library, compiled from the same sources with other flags.
_IS_ARM = platform.machine() in ("aarch64", "arm64")
ISAS = ("neonbf16", "neon") if _IS_ARM else ("avx512bf16", "avx512vnni", "avx512", "avx2")

# Libraries whose `ramet_interface` returns another number do not match the declarations below.
_INTERFACE = 17

# Values of `Into` for gated activations, in src/gemm.h, of `Storage` for codes, in src/matrix.h, and of `Recurrent`.
SILU, GELU = 2, 3
CODES = 2
SHORT_CONV, DELTA_NET = 1, 2


def _fields(integers: str = "", pointers: str = "", floats: str = "") -> list[tuple[str, type]]:
    kinds = (integers, c_int64), (pointers, c_void_p), (floats, c_float)
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Matrix(Structure):
    """Packed weights [n, k] (`src/matrix.h`)."""

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        *_fields("n k storage is_paired bits group has_minima is_nested is_float"),
    )


class Product(Structure):
    _fields_ = (
        ("a", c_void_p),
        ("lda", c_int64),
        ("m", c_int64),
        ("w", POINTER(Matrix)),
        ("c", c_void_p),
        *_fields("ldc columns into takes_pairs gives_pairs"),
    )


class SpanStruct(Structure):
    _fields_ = (("pages", c_void_p), ("length", c_int64), ("keep", c_void_p), ("turn", c_void_p), ("position", c_int64))


class EdgeStruct(Structure):
    _fields_ = (*_fields("num_rows span"), *_fields(pointers="rows visible hidden"))


class Shape(Structure):
    """Shape of the model's attention and of the pool."""

    _fields_ = _fields("heads kv_heads dim page_size is_bf16")


class LayerKV(Structure):
    """A layer's keys and values in the pool."""

    _fields_ = _fields(pointers="k v sinks")


class LatentStruct(Structure):
    """Latent attention of a layer."""

    _fields_ = (
        ("query_down", Matrix), ("query_norm", c_void_p), ("query", Matrix), ("row", Matrix), ("row_norm", c_void_p),
        ("absorb", POINTER(Matrix)), ("expand", POINTER(Matrix)),
        *_fields("rank plain rotated value"), ("factor", c_float), ("eps", c_float),
    )  # fmt: skip


class RecurrenceShape(Structure):
    """Shape of the recurrent layers (`src/recurrence.h`)."""

    _fields_ = _fields("kind channels width record most_drafted k_heads v_heads k_dim v_dim is_tiled")


class LayerState(Structure):
    _fields_ = _fields(pointers="taps tap_bias rate dt_bias norm tail matrix records")


class Save(Structure):
    _fields_ = _fields("row slot")


class StateRowsStruct(Structure):
    _fields_ = (*_fields("first stop slot target draft accepted"), ("saves", POINTER(Save)), ("num_saves", c_int64))


# Fields of ExpertSpec that the kernels read as they are.
EXPERT_FIELDS = ("count", "chosen", "groups", "chosen_groups", "best", "scale", "alpha")


class ExpertsStruct(Structure):
    """The experts of a layer (`src/experts.h`)."""

    _fields_ = (
        ("router", Matrix),
        ("shared_gate", Matrix),
        ("gate_up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("bias", c_void_p),
        *_fields("count chosen has_shared inner groups chosen_groups best"),
        *_fields("is_sigmoid is_normalized", floats="scale limit alpha"),
    )


class LayerStruct(Structure):
    _fields_ = (
        *_fields(pointers="input_norm post_norm q_norm k_norm o_norm down_norm"),
        ("inputs", Matrix * 4),
        *((name, Matrix) for name in ("o", "gate_up", "down")),
        ("experts", POINTER(ExpertsStruct)),
        ("kv", LayerKV),
        ("latent", POINTER(LatentStruct)),
        ("state", LayerState),
    )


class Model(Structure):
    _fields_ = (
        *_fields("hidden inner vocab num_layers"),
        ("eps", c_float), ("embedding_scale", c_float), ("gate", c_int64), ("shape", Shape),
        ("is_gated", c_int64), ("recurrence", RecurrenceShape),
        ("layers", POINTER(LayerStruct)), ("norm", c_void_p),
        ("head", Matrix), ("table", Matrix), ("embedding", c_void_p), ("embedding_is_bf16", c_int64),
    )  # fmt: skip


class HiddenRowsStruct(Structure):
    _fields_ = (("rows", c_void_p), ("num_rows", c_int64), ("states", c_void_p), ("adds", c_int64))


class LowRankStruct(Structure):
    _fields_ = (("a", Matrix), ("b", Matrix))


class AdapterLayer(Structure):
    _fields_ = tuple((name, LowRankStruct) for name in ("qkv", "o", "gate_up", "down"))


class AdaptedStruct(Structure):
    _fields_ = (("layers", POINTER(AdapterLayer)), *_fields("most_rank first stop"))


class GroupStruct(Structure):
    _fields_ = (
        *_fields("first_layer last_layer"),
        ("rows", c_void_p), ("num_rows", c_int64), ("kv_write", c_void_p),
        *_fields(pointers="cosine sine"),
        ("spans", POINTER(SpanStruct)), ("edges", POINTER(EdgeStruct)), ("num_edges", c_int64),
        ("load", POINTER(HiddenRowsStruct)), ("num_load", c_int64),
        ("save", POINTER(HiddenRowsStruct)), ("num_save", c_int64),
        ("adapted", POINTER(AdaptedStruct)), ("num_adapted", c_int64),
    )  # fmt: skip


class StepStruct(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("num_rows", c_int64),
        ("groups", POINTER(GroupStruct)),
        ("num_groups", c_int64),
        ("states", POINTER(StateRowsStruct)),
        ("num_states", c_int64),
        ("logits_rows", c_void_p),
        ("num_logits", c_int64),
        ("logits", c_void_p),
    )


class ChoiceStruct(Structure):
    """How to choose a token (`src/choose.h`)."""

    _fields_ = _fields(
        "row top_k is_drawn stream num_biased num_seen num_barred",
        "biased bias seen counts barred allowed",
        "divisor top_p min_p repetition frequency presence",
    )


class Projection(Structure):
    _fields_ = (*_fields("layer num_rows"), *_fields(pointers="states cosine sine out"))


_INTO_LIBRARY: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "interface": (c_int64, ()),
    "supported": (c_int64, ()),
    "team_create": (c_void_p, (c_int64,)),
    "team_destroy": (None, (c_void_p,)),
    "allocate": (c_void_p, (c_int64,)),
    "free": (None, (c_void_p, c_int64)),
    "matrix_bytes": (c_int64, (POINTER(Matrix),)),
    "matrix_columns": (c_int64, (POINTER(Matrix),)),
    "pack": (None, (c_void_p, POINTER(Matrix), c_void_p)),
    "multiply": (None, (c_void_p, POINTER(Product))),
    "mix": (None, (c_void_p, POINTER(ExpertsStruct), c_void_p, c_void_p, c_int64, c_int64)),
    "attend": (
        None,
        (
            c_void_p, POINTER(Shape), POINTER(LayerKV), POINTER(SpanStruct), POINTER(EdgeStruct), c_int64, c_int64,
            c_void_p, c_void_p,
        ),
    ),
    "argmax": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
    "choose": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p)),
    "measure": (
        None,
        (
            c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p,
        ),
    ),
    "decoder_create": (c_void_p, (POINTER(Model), c_void_p)),
    "decoder_destroy": (None, (c_void_p,)),
    "decoder_forward": (None, (c_void_p, POINTER(StepStruct))),
    "decoder_project": (None, (c_void_p, POINTER(Projection))),
}  # fmt: skip


class Library:
    """The kernels for one instruction set. Calls release the GIL.

    Attributes:
        isa: one of `ISAS`.
        path: file of the library.
        panel: number of columns in a panel (`src/matrix.h`).
        multiplies_pairs: whether it rounds both factors to bfloat16, if one is bfloat16.
    """

    def __init__(self, isa: str, path: Path):
        """Raises OSError if the library cannot be opened, AttributeError if it lacks a function."""
        self.isa, self.path = isa, path
        self.multiplies_pairs = isa.endswith("bf16")
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _INTO_LIBRARY.items():
            function = getattr(self._library, f"ramet_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.panel: int = self.matrix_columns(ctypes.byref(Matrix(n=1, k=1)))

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)


@cache
def load(isa: str) -> Library | None:
    """The library for one of `ISAS`; None: it was not built, or this processor does not support it."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_{isa}{suffix}")
        if path.exists():
            break
    else:
        return None
    return open_library(isa, path)


def open_library(isa: str, path: Path) -> Library | None:
    """The library in a file; None: another version, or this processor does not support it."""
    try:
        library = Library(isa, path)
    except (OSError, AttributeError):  # built for another system, or by a version without some function
        return None
    return library if library.interface() == _INTERFACE and library.supported() else None


def load_best() -> Library | None:
    """The library for the best instruction set of this processor, if there is any."""
    return next((library for isa in ISAS if (library := load(isa)) is not None), None)
