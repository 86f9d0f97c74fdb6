"""Blocks, and stores that fail as they are told."""

import threading
from pathlib import Path

import pytest

from radix import Namespace
from runtime.features.tiers.block import Fingerprint, Format, TierBlock
from runtime.features.tiers.host import HostStore

FORM = Format(Fingerprint("weights", "float32", "KV", 16, "rope").digest())


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def blocks_of(tenant: str, number: int, form: Format = FORM) -> list[TierBlock]:
    """The first blocks of a tenant's sequence, 16 tokens each."""
    return list(form.chain(Namespace(tenant), b"".join(i.to_bytes(4, "little") for i in range(16 * number)), 64))


def payload_of(block: TierBlock) -> bytes:
    """Bytes of its own for every block."""
    return block.key * 64


def stored(block: TierBlock, payload: bytes | None = None) -> list:
    """The buffers of a stored block."""
    return FORM.encode(block, payload_of(block) if payload is None else payload)


def put_block(store, block: TierBlock, payload: bytes | None = None) -> bool:
    return store.put(block.key, stored(block, payload), block.namespace.tenant)


def held(store: HostStore) -> list[bytes]:
    """The keys in a store, from the least to the most recently used."""
    return store._contents.of(None)


class FlakyStore(HostStore):
    """A store on another machine: `outlives`; it raises `error` if there is one, and waits for `gate` first."""

    name = "disk"
    outlives = True

    def __init__(self, name: str = "disk"):
        super().__init__(1 << 20)
        self.name = name
        self.error: OSError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []

    def _call(self, name, *values):
        self.calls.append(name)
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return getattr(super(), name)(*values)

    def contains_many(self, keys):
        return self._call("contains_many", keys)

    def get(self, key):
        return self._call("get", key)

    def put(self, key, buffers, tenant):
        return self._call("put", key, buffers, tenant)

    def touch(self, keys):
        return self._call("touch", keys)

    def delete(self, keys):
        return self._call("delete", keys)

    def erase(self, tenant):
        return self._call("erase", tenant)


@pytest.fixture
def flaky():
    store = FlakyStore()
    yield store
    store.gate.set()
