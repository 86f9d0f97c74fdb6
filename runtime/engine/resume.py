"""Prefixes that an engine notes for the next one: pins, and those that were used most."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from radix import Namespace, Node, path
from runtime.kv.tiers.block import ROOT, Block, Format, Mismatch
from runtime.kv.tiers.files import NOTES, replace_file

log = logging.getLogger("ramet.engine")

_ENTRY = "resume"


class Prefix(msgspec.Struct):
    """A path of the tree.

    Attributes:
        tokens: int32 little-endian.
        meta: as its record describes itself; None: it has none.
        is_pin: whether it is pinned, under `name` and until `expires`, seconds since the epoch; None: for ever.
    """

    tokens: bytes
    namespace: Namespace
    meta: dict[str, Any] | None = None
    is_pin: bool = False
    name: str | None = None
    expires: float | None = None

    @staticmethod
    def of(node: Node) -> Prefix:
        """The path that ends in a node."""
        tokens = b"".join(above.key for above in reversed(list(path(node))))
        return Prefix(tokens, node.namespace, None if node.meta is None else node.meta.describe())

    @property
    def left_s(self) -> float | None:
        """Seconds until the pin expires."""
        return None if self.expires is None else self.expires - time.time()


class Resume:
    """A file beside the blocks of a disk cache, written and believed as blocks are: a part for each tenant."""

    def __init__(self, directory: Path, form: Format):
        self._path = directory / f"{NOTES}{form.fingerprint.hex()}"
        self._form = form

    def write(self, prefixes: Iterable[Prefix]) -> None:
        """Replace what the file says. Where it cannot be written, it stays as it was."""
        parts = defaultdict[str, list[Prefix]](list)
        for prefix in prefixes:
            parts[prefix.namespace.tenant].append(prefix)
        encode, seal = msgspec.msgpack.encode, self._form.encode
        data = {tenant: b"".join(seal(self._block(tenant), encode(part))) for tenant, part in parts.items()}
        try:
            replace_file(self._path, encode(data))
        except OSError as error:
            log.warning("%s: pins and hot prefixes are not noted: %s", self._path.parent, error.strerror)

    def read(self) -> list[Prefix]:
        """Pins first. Parts that are damaged, or whose tenant was erased, are left out."""
        found: list[Prefix] = []
        with suppress(OSError, msgspec.DecodeError):
            parts = msgspec.msgpack.decode(self._path.read_bytes(), type=dict[str, bytes])
            for tenant, data in parts.items():
                payload = self._form.decode(data, self._block(tenant))
                if not isinstance(payload, Mismatch):
                    found += msgspec.msgpack.decode(payload, type=list[Prefix])
        return sorted(found, key=lambda prefix: not prefix.is_pin)

    def erase(self, tenant: str | None) -> None:
        """Forget the prefixes of a tenant, or all; notes of other models are deleted."""
        for other in self._path.parent.glob(f"{NOTES}*"):
            if other != self._path:
                with suppress(OSError):
                    other.unlink()
        self.write([] if tenant is None else [p for p in self.read() if p.namespace.tenant != tenant])

    def _block(self, tenant: str) -> Block:
        namespace = Namespace(tenant, entry=_ENTRY)
        return Block(self._form.key(ROOT, namespace, b""), namespace, b"")
