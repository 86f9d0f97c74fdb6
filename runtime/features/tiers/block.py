"""Blocks of KV under content addresses, and their stored form.

A stored block is `head | checksum | tenant | body`. The head has a fixed size and gives the lengths of the rest; the
checksum (XXH3, 128 bits) covers all other bytes; the body is tokens and payload, encrypted if there is a cipher.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128

from radix import Namespace
from radix.events import Stored
from radix.node import has_names

if TYPE_CHECKING:
    from runtime.features.tiers.crypt import KeyFile

BlockKey = bytes
Buffer = bytes | bytearray | memoryview

ROOT: BlockKey = bytes(16)
_MAGIC, _VERSION, _SEALED = b"RKVB", 1, 1
# magic, version, flags, bytes of tenant, tokens and payload; key, fingerprint, namespace
_HEAD = struct.Struct("<4sHHIIQ16s16s16s")
# Maximum size of a block; a larger length is a flipped bit, or an attack.
_MOST_BYTES = 1 << 31
# Enough for the head, the checksum and the name of most tenants.
HEAD_BYTES = 1024


class Fingerprint(NamedTuple):
    """Everything that the bytes of a block depend on, except tokens and namespace."""

    weights: str
    dtype: str
    layout: str
    page_size: int
    spec: str
    shard: str = "0/1"
    kind: str = "causal"

    def digest(self) -> bytes:
        """The digest, 16 bytes."""
        return _digest(b"fingerprint", *(str(field).encode() for field in self))


class TierBlock(NamedTuple):
    """A block's key, and everything else that a stored block must match.

    Attributes:
        key: digest of the block and of all blocks before it.
        namespace: namespace of the sequence.
        tokens: the block's own tokens, int32 little-endian.
        event: KV event of the block; stored blocks need not match it.
    """

    key: BlockKey
    namespace: Namespace
    tokens: bytes
    event: Stored | None = None


class Head(NamedTuple):
    """The head of a stored block; `body`: byte offset of tokens and payload; `num_bytes`: size of the whole block."""

    key: BlockKey
    tenant: str
    fingerprint: bytes
    namespace: bytes
    sealed: bool
    num_token_bytes: int
    num_bytes: int
    body: int


class Mismatch(StrEnum):
    """The reason why bytes are not the expected block."""

    TRUNCATED = "truncated"
    FORMAT = "format"
    CHECKSUM = "checksum"
    FINGERPRINT = "fingerprint"
    KEY = "key"
    NAMESPACE = "namespace"
    TOKENS = "tokens"
    CIPHER = "cipher"


class Format:
    """Computes keys of blocks, encodes and decodes blocks, for one model with one layout.

    Args:
        fingerprint: `Fingerprint.digest()`.
        cipher: None: no encryption.
        sight: what the rows of images depend on besides, see `describe_sight`. Blocks of text alone do not.
    """

    def __init__(self, fingerprint: bytes = b"", cipher: KeyFile | None = None, sight: bytes = b""):
        self.fingerprint = fingerprint
        self.cipher = cipher
        self._sight = sight

    @property
    def _secret(self) -> bytes:
        return self.fingerprint + (self.cipher.name_secret if self.cipher else b"")

    def key(self, parent: BlockKey, namespace: Namespace, tokens: bytes) -> BlockKey:
        """The key of the block that follows `parent`; `ROOT` is the parent of a namespace's first block."""
        fields = [parent, namespace.to_bytes(), tokens]
        if self._sight and has_names(tokens):
            fields.append(self._sight)
        return _digest(self._secret, *fields)

    def chain(
        self, namespace: Namespace, tokens: bytes, block_bytes: int, parent: BlockKey = ROOT
    ) -> Iterator[TierBlock]:
        """The whole blocks of tokens that follow `parent`; `block_bytes`: bytes of a block's tokens."""
        for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
            own = tokens[start : start + block_bytes]
            parent = self.key(parent, namespace, own)
            yield TierBlock(parent, namespace, own)

    def encode(self, block: TierBlock, payload: Buffer, *, sealed: bool = True) -> list[Buffer]:
        """The buffers of a stored block, in order; without encryption, the last one is the payload, not copied.

        Args:
            sealed: False: never encrypt, for main memory.

        Raises:
            OSError: if the cipher has no key for the tenant and can make none.
        """
        cipher = self.cipher if sealed else None
        tenant = utf8(block.namespace.tenant)
        flags = _SEALED if cipher else 0
        lengths = (len(tenant), len(block.tokens), memoryview(payload).nbytes)
        head = _HEAD.pack(
            _MAGIC, _VERSION, flags, *lengths, block.key, self.fingerprint, self._namespace(block.namespace)
        )
        body: list[Buffer] = [block.tokens, memoryview(payload).cast("B")]
        if cipher:
            body = [cipher.seal(block.namespace.tenant, b"".join(body), head + tenant)]
        return [head, _checksum(head, tenant, *body), tenant, *body]

    def decode(self, data: Buffer, block: TierBlock, *, sealed: bool = True) -> memoryview | Mismatch:
        """The payload of a stored block, or the first reason why it is not `block`; `sealed`: see `encode`."""
        view = memoryview(data).cast("B")
        head = read_block(view)
        if isinstance(head, Mismatch):
            return head
        if head.fingerprint != self.fingerprint:
            return Mismatch.FINGERPRINT
        if head.key != block.key:
            return Mismatch.KEY
        if head.namespace != self._namespace(block.namespace) or head.tenant != block.namespace.tenant:
            return Mismatch.NAMESPACE
        body = view[head.body :]
        cipher = self.cipher if sealed else None
        if head.sealed != (cipher is not None):
            return Mismatch.CIPHER
        if cipher:
            opened = cipher.open(head.tenant, body, bytes(view[: _HEAD.size]) + utf8(head.tenant))
            if opened is None:
                return Mismatch.CIPHER
            body = memoryview(opened)
        if body[: head.num_token_bytes] != block.tokens:
            return Mismatch.TOKENS
        return body[head.num_token_bytes :]

    def _namespace(self, namespace: Namespace) -> bytes:
        return _digest(self._secret, b"namespace", namespace.to_bytes())


def read_head(data: Buffer) -> Head | Mismatch:
    """The head of a stored block, from its first bytes. Nothing of it is verified."""
    view = memoryview(data).cast("B")
    begin = _HEAD.size + 16
    if len(view) < begin:
        return Mismatch.TRUNCATED
    magic, version, flags, tenant, tokens, payload, key, fingerprint, namespace = _HEAD.unpack_from(view)
    if magic != _MAGIC or version != _VERSION or flags & ~_SEALED or tenant + tokens + payload > _MOST_BYTES:
        return Mismatch.FORMAT
    if len(view) < begin + tenant:
        return Mismatch.TRUNCATED
    try:
        name = str(view[begin : begin + tenant], "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return Mismatch.FORMAT
    size = begin + tenant + tokens + payload + (SEAL_BYTES if flags & _SEALED else 0)
    return Head(key, name, fingerprint, namespace, bool(flags & _SEALED), tokens, size, begin + tenant)


def read_block(data: Buffer) -> Head | Mismatch:
    """The head of a complete stored block whose checksum is right."""
    view = memoryview(data).cast("B")
    head = read_head(view)
    if isinstance(head, Mismatch):
        return head
    if len(view) != head.num_bytes:
        return Mismatch.TRUNCATED
    if view[_HEAD.size : _HEAD.size + 16] != _checksum(view[: _HEAD.size], view[_HEAD.size + 16 :]):
        return Mismatch.CHECKSUM
    return head


# AES-256-GCM: nonce and tag.
SEAL_BYTES = 12 + 16


def _checksum(*parts: Buffer) -> bytes:
    state = xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def _digest(secret: bytes, *parts: bytes) -> bytes:
    state = blake2b(digest_size=16, key=secret)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def utf8(name: str) -> bytes:
    """The name of a tenant, which may contain lone surrogates, as bytes."""
    return name.encode("utf-8", "surrogatepass")
