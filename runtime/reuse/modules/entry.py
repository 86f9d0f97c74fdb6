"""Entries: tokens that are encoded together and see nothing else; some of their rows are kept for other requests."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec
import numpy as np

from radix import Namespace
from radix.node import TOKEN_BYTES
from runtime.errors import InvalidRequest
from runtime.protocol import ModelInfo
from runtime.request import Sequence

Pairs = list[tuple[int, int]]


class EntryFields(msgspec.Struct):
    """An entry as a message has it.

    Attributes:
        tokens: int32 little-endian, placeholders included.
        anchors: (index, position) pairs, see `runtime.request.Sequence`.
        holes: ranges [start, stop) of indices: placeholder rows, which are encoded but not kept.
        name: for people; no part of the entry's key.
    """

    tokens: bytes
    anchors: Pairs
    holes: Pairs = []
    name: str = ""


class Layout(msgspec.Struct):
    """The `reuse` fields of a message: the entries that a request reads, and the anchors of its own tokens.

    `schema` is for people.
    """

    entries: list[EntryFields]
    anchors: Pairs = []
    schema: str = ""

    @staticmethod
    def read(asked: dict[str, Any]) -> Layout:
        """Raises InvalidRequest for fields of other types."""
        try:
            return msgspec.convert(asked, Layout)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"reuse: {error}", param="reuse") from None


@dataclass(frozen=True, slots=True)
class ModuleMeta:
    """The record of an entry's run in the tree: the names that it had first, and its rows without the padding."""

    schema: str
    name: str
    tokens: int

    def describe(self) -> dict[str, Any]:
        return {"schema": self.schema, "module": self.name, "module_tokens": self.tokens}


@dataclass(slots=True, eq=False)
class Entry:
    """An entry that a request reads.

    Attributes:
        sequence: its tokens and their positions.
        is_kept: bool [n], the rows that are kept.
        namespace: in which the kept rows lie in the tree; equal tokens, anchors and holes give the same one.
        num_kept: int32 [n], how many rows up to each one, itself included, are kept.
        length: how many are kept in all; num_holes: how many are not.
        tokens: of the kept rows.
        key: the same as the tree's key: whole pages; what the last one lacks is -1, which no token is.
    """

    name: str
    sequence: Sequence
    is_kept: np.ndarray
    namespace: Namespace
    page_size: InitVar[int]
    num_kept: np.ndarray = field(init=False)
    length: int = field(init=False)
    num_holes: int = field(init=False)
    tokens: array[int] = field(init=False)
    key: bytes = field(init=False)

    def __post_init__(self, page_size: int) -> None:
        self.num_kept = np.cumsum(self.is_kept, dtype=np.int32)
        self.length = int(self.num_kept[-1])
        self.num_holes = len(self.is_kept) - self.length
        self.tokens = array("i", np.frombuffer(self.sequence.tokens, dtype=np.int32)[self.is_kept].tobytes())
        self.key = (self.tokens + array("i", [-1]) * (-self.length % page_size)).tobytes()

    @property
    def before_holes(self) -> int:
        """Rows before the first one that is not kept."""
        return int(self.is_kept.argmin()) if self.num_holes else self.length


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
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    place = namespace.for_entry("module", digest)
    return Entry(fields.name, Sequence(tokens, anchors=anchors), is_kept, place, model.page_size)


def read_tokens(data: bytes, vocab_size: int, what: str) -> array[int]:
    """Raises InvalidRequest for what is no run of the model's tokens."""
    if len(data) % TOKEN_BYTES:
        raise InvalidRequest(f"{what} has {len(data)} bytes of tokens; a token has {TOKEN_BYTES}", param="reuse")
    tokens = array("i", data)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(f"{what} has a token outside of the model's {vocab_size}", param="reuse")
    return tokens


def read_anchors(anchors: Pairs, length: int, context_length: int, what: str) -> Pairs:
    """Anchors without those that change nothing; positions may stand still, but not go back. Raises InvalidRequest.

    An anchor behind the last token places those that follow.
    """
    found: Pairs = []
    for index, position in anchors:
        at, start = found[-1] if found else (-1, -1)
        following = start + index - at if found else 0
        if index <= at or (not found and index) or index > length or position < max(following - 1, 0):
            raise InvalidRequest(f"{what} has an anchor ({index}, {position}) out of order", param="reuse")
        if not found or position != following:
            found.append((index, position))
    if not found:
        raise InvalidRequest(f"{what} has no anchors", param="reuse")
    at, start = found[-1]
    if (last := start + max(length - at, 1)) > context_length:
        message = f"the positions of {what} go up to {last}; the model's context is {context_length} tokens"
        raise InvalidRequest(message, param="reuse", code="context_length_exceeded")
    return found
