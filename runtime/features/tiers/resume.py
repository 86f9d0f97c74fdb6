"""A file with the pins that an engine restores at its next start."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from radix import Namespace, text_of_path
from runtime.features.tiers.block import ROOT, Format, Mismatch, TierBlock
from runtime.features.tiers.files import NOTES, replace_file
from runtime.kv.pins import Pin

log = logging.getLogger("ramet.engine")

_ENTRY = "resume"


class NotedPin(msgspec.Struct):
    """A pinned path of the tree.

    Attributes:
        tokens: int32 little-endian.
        meta: the description of the path's record; None: it has no record.
        expires: seconds since the epoch; None: never.
    """

    tokens: bytes
    namespace: Namespace
    meta: dict[str, object] | None = None
    name: str | None = None
    expires: float | None = None

    @staticmethod
    def of(pin: Pin, left_s: float | None) -> NotedPin:
        node = pin.node
        meta = None if node.meta is None or node.is_attached else node.meta.describe()
        return NotedPin(
            text_of_path(node), node.namespace, meta, pin.name, None if left_s is None else time.time() + left_s
        )

    @property
    def left_s(self) -> float | None:
        """Seconds until the pin expires."""
        return None if self.expires is None else self.expires - time.time()


class Resume:
    """A file of pins in the directory of a disk cache: one part for each tenant, encoded and verified like a block."""

    def __init__(self, directory: Path, form: Format):
        self._path = directory / f"{NOTES}{form.fingerprint.hex()}"
        self._form = form

    def write(self, pins: Iterable[NotedPin]) -> None:
        """Replace the file. If that fails, the old file stays."""
        parts = defaultdict[str, list[NotedPin]](list)
        for pin in pins:
            parts[pin.namespace.tenant].append(pin)
        encode, seal = msgspec.msgpack.encode, self._form.encode
        data = {tenant: b"".join(seal(self._block(tenant), encode(part))) for tenant, part in parts.items()}
        try:
            replace_file(self._path, encode(data))
        except OSError as error:
            log.warning("%s: pins are not noted for the next start: %s", self._path.parent, error.strerror)

    def read(self) -> list[NotedPin]:
        """All noted pins; parts that are damaged, or whose tenant was erased, are left out."""
        found: list[NotedPin] = []
        with suppress(OSError, msgspec.DecodeError):
            parts = msgspec.msgpack.decode(self._path.read_bytes(), type=dict[str, bytes])
            for tenant, data in parts.items():
                payload = self._form.decode(data, self._block(tenant))
                if not isinstance(payload, Mismatch):
                    found += msgspec.msgpack.decode(payload, type=list[NotedPin])
        return found

    def erase(self, tenant: str | None) -> None:
        """Delete the pins of a tenant, or of all (None). Pin files of other models are deleted, too."""
        for other in self._path.parent.glob(f"{NOTES}*"):
            if other != self._path:
                with suppress(OSError):
                    other.unlink()
        self.write([] if tenant is None else [pin for pin in self.read() if pin.namespace.tenant != tenant])

    def _block(self, tenant: str) -> TierBlock:
        namespace = Namespace(tenant, entry=_ENTRY)
        return TierBlock(self._form.key(ROOT, namespace, b""), namespace, b"")
