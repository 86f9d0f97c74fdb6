"""Modules as a message has them, and the entries that they are."""

from __future__ import annotations

import msgspec
import numpy as np

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.kv.segments import Sequence
from runtime.protocol import ModelInfo
from runtime.reuse.entries.entry import Entry, Pairs, digest, read_anchors, read_tokens


class EntryFields(msgspec.Struct):
    """An entry as a message has it.

    Attributes:
        tokens: int32 little-endian, placeholders included.
        anchors: (index, position) pairs, see `runtime.request.Sequence`.
        holes: ranges [start, stop) of indices: placeholder rows, which are encoded but not kept.
        name: shown in answers; no part of the entry's key.
    """

    tokens: bytes
    anchors: Pairs
    holes: Pairs = []
    name: str = ""


class ModuleFields(msgspec.Struct):
    """The `reuse` fields of a message: the entries that a request reads, and the anchors of its own tokens.

    `schema` is a name that the tree shows.
    """

    entries: list[EntryFields]
    anchors: Pairs = []
    schema: str = ""


def read_entry(fields: EntryFields, namespace: Namespace, model: ModelInfo) -> Entry | None:
    """The entry that a message describes; None if no row of it is kept. Raises InvalidRequest."""
    what = f"entry {fields.name!r}"
    tokens = read_tokens(fields.tokens, model.vocab_size, what)
    is_kept = np.ones(len(tokens), dtype=bool)
    at = 0
    for start, stop in fields.holes:
        if not at <= start < stop <= len(tokens):
            raise InvalidRequest(f"{what} has a hole [{start}, {stop}) outside of its tokens or another", param="reuse")
        is_kept[start:stop] = False
        at = stop
    if not is_kept.any():
        return None
    anchors = read_anchors(fields.anchors, len(tokens), model.context_length, what)
    content = msgspec.msgpack.encode((fields.tokens, anchors, is_kept.tobytes()))
    own = namespace.for_entry("module", digest(content))
    return Entry(fields.name, Sequence(tokens, anchors=anchors), is_kept, own, model.page_size)
