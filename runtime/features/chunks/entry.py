"""Entries: runs of tokens that are encoded apart, so that many requests can read the KV of their kept rows."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

import msgspec
import numpy as np

from radix import Namespace
from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import ModuleAsk, Pairs
from runtime.kv.segments import Run, Sequence
from runtime.protocol import ModelInfo


@dataclass(slots=True, eq=False)
class Entry:
    """An entry that a request reads.

    Attributes:
        sequence: its tokens, and the positions at which they are encoded.
        is_kept: bool [n], false for placeholder rows and those of a lead ("holes"), which are encoded but not kept.
        namespace: of the kept rows in the tree, equal for equal tokens, anchors and holes.
        num_kept: int32 [n], the number of kept rows up to and including each row.
        length, num_holes: total number of kept rows, and of the other rows.
        tokens, positions: of the kept rows, int32 and int64 [length].
        key: `tokens` as the tree's key, padded to whole pages with -1, which is not a token.
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
    positions: np.ndarray = field(init=False)
    key: bytes = field(init=False)

    def __post_init__(self, page_size: int) -> None:
        self.num_kept = np.cumsum(self.is_kept, dtype=np.int32)
        self.length = int(self.num_kept[-1])
        self.num_holes = len(self.is_kept) - self.length
        self.tokens = array("i", np.frombuffer(self.sequence.tokens, dtype=np.int32)[self.is_kept].tobytes())
        self.positions = self.sequence.positions(0, len(self.is_kept))[self.is_kept]
        self.key = (self.tokens + array("i", [-1]) * (-self.length % page_size)).tobytes()

    def run(self, meta: EntryMeta | None = None) -> Run:
        """The run of the tree that holds the kept rows."""
        return Run(array("i", self.key), self.namespace, self.name, meta)


@dataclass(frozen=True, slots=True)
class EntryMeta:
    """The record of an entry on its nodes in the tree.

    Attributes:
        kind, name: `module` or `document`, and the entry's name in the first request that encoded it.
        tokens: number of kept rows, without the padding.
    """

    kind: str
    name: str
    tokens: int
    more: Mapping[str, object] = field(default_factory=dict)

    def describe(self) -> dict[str, object]:
        return {**self.more, self.kind: self.name, f"{self.kind}_tokens": self.tokens}


def read_module(fields: ModuleAsk, namespace: Namespace, model: ModelInfo) -> Entry | None:
    """The entry that a message describes; None if it consists of holes only. Raises InvalidRequest."""
    what, tokens = f"entry {fields.name!r}", array("i", fields.tokens)
    if tokens and not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise InvalidRequest(f"{what} has a token outside of the model's {model.vocab_size}", param="reuse")
    is_kept = np.ones(len(tokens), dtype=bool)
    for start, stop in fields.holes:
        is_kept[start:stop] = False
    if not is_kept.any():
        return None
    anchors = read_anchors(fields.anchors, len(tokens), model.context_length, what)
    content = msgspec.msgpack.encode((fields.tokens, anchors, is_kept.tobytes()))
    own = namespace.for_entry("module", digest(content))
    return Entry(fields.name, Sequence(tokens, anchors=anchors), is_kept, own, model.page_size)


def digest(content: bytes) -> str:
    """A hash of content, as a name within namespaces."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_anchors(anchors: Pairs, length: int, context_length: int, what: str) -> Pairs:
    """Anchors without redundant ones. Raises InvalidRequest for positions beyond the context."""
    found: Pairs = []
    for index, position in anchors:
        at, start = found[-1] if found else (-1, -1)
        following = start + index - at if found else 0
        if not found or position != following:
            found.append((index, position))
    at, start = found[-1]
    if (last := start + max(length - at, 1)) > context_length:
        message = f"the positions of {what} go up to {last}; the model's context is {context_length} tokens"
        raise InvalidRequest(message, param="reuse", code="context_length_exceeded")
    return found
