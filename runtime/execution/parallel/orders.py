"""Orders from the driver to the other ranks, encoded in msgpack with extension types for tensors."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from runtime.batch import AttentionPlan, Edge, ForwardBatch, HiddenRows, LayerGroup, Span


@dataclass(slots=True)
class CopyRows:
    """Copy the first `rows` rows of a page of the pool into another."""

    source_page: int
    target_page: int
    rows: int


@dataclass(slots=True)
class ReadPages:
    """Send the contents of pages to the driver."""

    pages: list[int]


@dataclass(slots=True)
class WritePages:
    """Fill pages; `data`: uint8 [2, layers, pages, bytes]."""

    pages: list[int]
    data: np.ndarray


Order = ForwardBatch | CopyRows | ReadPages | WritePages

_KINDS: dict[str, type[CopyRows | ReadPages | WritePages]] = {"copy": CopyRows, "read": ReadPages, "write": WritePages}

_TENSOR, _ARRAY, _SLICE, _RANGE = range(4)


def encode_order(order: Order) -> bytes:
    """Encode an order. `LayerGroup.save` is left out, because only the driver saves states."""
    for name, kind in _KINDS.items():
        if isinstance(order, kind):
            return _encoder.encode([name, order])
    assert isinstance(order, ForwardBatch)
    groups = [replace(group, save=[]) for group in order.groups]
    return _encoder.encode(["forward", replace(order, groups=groups)])


def decode_order(data: bytes) -> Order:
    """Decode an order; its tensors are on the CPU."""
    kind, fields = _decoder.decode(data)
    if kind in _KINDS:
        return _KINDS[kind](**fields)
    fields["groups"] = [_group(group) for group in fields["groups"]]
    return ForwardBatch(**fields)


def _group(fields: dict[str, Any]) -> LayerGroup:
    fields["attention"] = _plan(fields["attention"])
    fields["load"] = [HiddenRows(**rows) for rows in fields["load"]]
    return LayerGroup(**fields)


def _plan(fields: dict[str, Any]) -> AttentionPlan:
    return AttentionPlan(
        fields["num_rows"], [Span(**span) for span in fields["spans"]], [Edge(**edge) for edge in fields["edges"]]
    )


def _encode_object(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(_TENSOR, _encode_array(value.cpu().numpy()))
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _encode_array(value))
    if isinstance(value, slice):
        return msgspec.msgpack.Ext(_SLICE, msgspec.msgpack.encode((value.start, value.stop)))
    if isinstance(value, range):
        return msgspec.msgpack.Ext(_RANGE, msgspec.msgpack.encode((value.start, value.stop)))
    raise NotImplementedError(f"no extension for {type(value)}")


def _encode_array(array: np.ndarray) -> bytes:
    return msgspec.msgpack.encode((array.dtype.str, array.shape, array.tobytes()))


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _SLICE:
        return slice(*msgspec.msgpack.decode(data))
    if code == _RANGE:
        return range(*msgspec.msgpack.decode(data))
    dtype, shape, raw = msgspec.msgpack.decode(data)
    array = np.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return torch.from_numpy(array) if code == _TENSOR else array


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_object)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode_extension)
