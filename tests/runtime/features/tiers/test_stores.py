"""What all stores promise, and the order in which bounded ones evict."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.features.tiers.block import TierBlock
from runtime.features.tiers.files import FileStore
from runtime.features.tiers.host import HostStore
from runtime.features.tiers.store import Usage
from tests.runtime.features.tiers.conftest import FORM, MEMORY, blocks_of, payload_of, put_block, stored

TENANTS = ["alice", "bob", "\ud800"]
BLOCKS = [block for tenant in TENANTS for block in blocks_of(tenant, 8)]
SMALL = len(b"".join(stored(BLOCKS[0])))


@pytest.fixture(params=["host", "disk", "shared", "redis"])
def store(request, tmp_path):
    if request.param == "host":
        yield HostStore(1 << 20)
    elif request.param == "redis":
        pytest.importorskip("redis")
        from runtime.features.tiers.redis import RedisStore
        from tests.redis_server import PROGRAM, running_redis

        if PROGRAM is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        with running_redis() as server:
            yield RedisStore(server.url, 60)
    else:
        yield FileStore(tmp_path / "blocks", "--kv-store", 1 << 20 if request.param == "disk" else None)


def test_the_contract_of_a_store(store):
    for block in BLOCKS:
        assert put_block(store, block)
    keys = [block.key for block in BLOCKS]
    assert store.contains_many([*keys, bytes(16)]) == [True] * len(keys) + [False]
    assert store.contains_many([]) == []
    assert FORM.decode(store.get(keys[0]), BLOCKS[0]) == payload_of(BLOCKS[0])
    assert store.get(bytes(16)) is None
    store.touch([keys[0], bytes(16)])
    sizes = [len(b"".join(stored(block))) for block in BLOCKS]
    usage = store.usage()
    assert usage.blocks == 24
    assert usage.bytes == sum(sizes) or (store.name == "store" and usage.bytes > sum(sizes))
    assert put_block(store, BLOCKS[1], b"other")
    assert FORM.decode(store.get(keys[1]), BLOCKS[1]) == b"other"
    store.delete([keys[0], bytes(16)])
    assert store.get(keys[0]) is None
    assert store.erase("alice") == 7
    assert store.contains_many(keys) == [False] * 8 + [True] * 16
    assert store.erase(None) == 16
    assert store.erase(None) == 0
    store.close()


@pytest.mark.parametrize("use", ["get", "touch", "put"])
def test_a_block_that_was_used_stays_longest(use):
    store = HostStore(2 * SMALL)
    first, second, third = (block for block in BLOCKS[:3])
    put_block(store, first)
    put_block(store, second)
    {"get": store.get, "touch": lambda key: store.touch([key]), "put": lambda key: put_block(store, first)}[use](
        first.key
    )
    put_block(store, third)
    assert store.contains_many([first.key, second.key, third.key]) == [True, False, True]


class BoundedStore(RuleBasedStateMachine):
    """A bounded store beside a plain list from the least to the most recently used."""

    CAPACITY = 10 * SMALL

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.plain: dict[TierBlock, int] = {}
        self.evicted: list[bytes] = []
        self.open()

    def open(self):
        self.store = HostStore(self.CAPACITY)
        self.store.on_evict = self.evicted.extend

    def size_of(self, tenant=None):
        return sum(size for block, size in self.plain.items() if tenant in (None, block.namespace.tenant))

    def drop(self, block):
        del self.plain[block]
        self.expected.append(block.key)

    # Mostly several blocks at once.
    @rule(block=st.sampled_from(BLOCKS), extra=st.sampled_from([0, 0, 700, 5 * SMALL, 10 * SMALL]))
    def put(self, block, extra):
        payload = bytes(len(payload_of(block)) + extra)
        size = sum(map(len, stored(block, payload)))
        self.evicted.clear()
        self.expected = []
        assert put_block(self.store, block, payload) == (size <= self.CAPACITY)
        if size > self.CAPACITY:
            return
        self.plain.pop(block, None)
        while self.size_of() + size > self.CAPACITY:
            self.drop(next(iter(self.plain)))
        self.plain[block] = size
        assert self.evicted == self.expected

    @rule(block=st.sampled_from(BLOCKS))
    def get(self, block):
        data = self.store.get(block.key)
        assert (data is not None) == (block in self.plain)
        if data is not None:
            assert len(data) == self.plain[block]
            assert not any(FORM.decode(data, block))
            self.plain[block] = self.plain.pop(block)

    @rule(block=st.sampled_from(BLOCKS))
    def touch(self, block):
        self.store.touch([block.key])
        if block in self.plain:
            self.plain[block] = self.plain.pop(block)

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), max_size=3))
    def delete(self, blocks):
        self.store.delete([block.key for block in blocks])
        for block in blocks:
            self.plain.pop(block, None)

    @rule(tenant=st.sampled_from([*TENANTS, None]))
    def erase(self, tenant):
        gone = [block for block in self.plain if tenant in (None, block.namespace.tenant)]
        assert self.store.erase(tenant) == len(gone)
        for block in gone:
            del self.plain[block]

    @invariant()
    def agrees(self):
        self.now += 1
        assert self.store.usage() == Usage(self.size_of(), len(self.plain), self.CAPACITY)
        assert self.store.contains_many([block.key for block in BLOCKS]) == [block in self.plain for block in BLOCKS]


class BoundedDirectory(BoundedStore):
    """On a disk, with restarts, and another process that looks on and deletes."""

    def open(self):
        self.root = getattr(self, "root", None) or tempfile.mkdtemp(dir=MEMORY)
        self.store = FileStore(Path(self.root), "--disk-cache", self.CAPACITY, clock=lambda: self.now)
        self.store.on_evict = self.evicted.extend

    @rule()
    def restart(self):
        self.store.close()
        self.open()

    @precondition(lambda self: self.plain)
    @rule(which=st.integers(0, 20), bounded=st.booleans())
    def another_process_deletes(self, which, bounded):
        block = list(self.plain)[which % len(self.plain)]
        FileStore(Path(self.root), "", self.CAPACITY if bounded else None).delete([block.key])
        del self.plain[block]

    @invariant()
    def files_agree(self):
        entries = sorted(self.store.entries(), key=lambda entry: entry.used)
        assert [(entry.key, entry.size) for entry in entries] == [(b.key, size) for b, size in self.plain.items()]
        assert all(999 < entry.used <= self.now for entry in entries)

    def teardown(self):
        shutil.rmtree(self.root)


TestHost = BoundedStore.TestCase
TestDirectory = BoundedDirectory.TestCase
TestHost.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDirectory.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)


def test_a_block_that_was_read_stays_valid_after_its_eviction():
    store = HostStore(4)
    data = bytearray(b"abcd")
    store.put(b"1", [data], "")
    data[:] = b"zzzz"
    found = store.get(b"1")
    assert store.put(b"2", [b"efgh"], "")
    assert found == b"abcd"
    assert store.get(b"1") is None


def test_a_use_by_another_process_saves_a_block_from_eviction(tmp_path):
    now = time.time()
    ours, theirs = (FileStore(tmp_path / "blocks", "", 3 * SMALL, clock=lambda: now) for _ in range(2))
    for block in BLOCKS[:3]:
        put_block(ours, block)
        now += 5
    theirs.get(BLOCKS[0].key)
    now += 5
    put_block(ours, BLOCKS[3])
    assert ours.contains_many([block.key for block in BLOCKS[:4]]) == [True, False, True, True]
