"""Blocks as files: bounds, restarts, other processes, kills, and disks that refuse."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radix import Namespace
from runtime.errors import ModelError
from runtime.kv.tiers.block import ROOT, Block
from runtime.kv.tiers.disk import DiskStore
from runtime.kv.tiers.files import BlockFiles, DirectoryStore
from runtime.kv.tiers.store import Limits, Usage
from tests.full_disk import little_room
from tests.runtime.kv.tiers.conftest import FORM, blocks_of, payload_of

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
TENANTS = ["alice", "bob", "\ud800"]
# Eight blocks of each tenant, with payloads of two sizes.
ALL = [block for tenant in TENANTS for block in blocks_of(tenant, 8)]


def stored(block: Block, size: int = 100) -> list:
    return FORM.encode(block, (payload_of(block) * 64)[:size])


def put(store, block, size=100):
    return store.put(block.key, stored(block, size), block.namespace.tenant, "evicted")


SMALL = sum(len(part) for part in stored(ALL[0]))
# Names of tenants are part of a block.
SIZES = {tenant: SMALL - len("alice") + len(tenant.encode("utf-8", "surrogatepass")) for tenant in TENANTS}


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path) / "cache"


class DiskMachine(RuleBasedStateMachine):
    """A disk store beside a plain list from the least to the most recently used."""

    @initialize()
    def start(self):
        self.root = tempfile.mkdtemp(dir=MEMORY)
        self.now = 1000.0
        self.limits = Limits(10 * SMALL, {"alice": 4 * SMALL}, 6 * SMALL)
        self.plain: dict[Block, int] = {}
        self.open()

    def open(self):
        self.store = DiskStore(Path(self.root), self.limits, clock=lambda: self.now)

    def size_of(self, tenant=None):
        return sum(size for block, size in self.plain.items() if tenant in (None, block.namespace.tenant))

    @rule(block=st.sampled_from(ALL), large=st.booleans())
    def put(self, block, large):
        tenant = block.namespace.tenant
        size = SIZES[tenant] + 700 * large
        quota = self.limits.of(tenant)
        assert put(self.store, block, 100 + 700 * large) == (size <= quota)
        if size > quota:
            return
        self.plain.pop(block, None)
        while self.size_of(tenant) + size > quota:
            del self.plain[next(old for old in self.plain if old.namespace.tenant == tenant)]
        while self.size_of() + size > self.limits.capacity:
            del self.plain[next(iter(self.plain))]
        self.plain[block] = size

    @rule(block=st.sampled_from(ALL))
    def get(self, block):
        data = self.store.get(block.key)
        assert (data is not None) == (block in self.plain)
        if data is not None:
            assert len(data) == self.plain[block]
            payload = (payload_of(block) * 64)[: 800 if len(data) > SIZES[block.namespace.tenant] else 100]
            assert FORM.decode(data, block) == payload
            self.plain[block] = self.plain.pop(block)

    @rule(block=st.sampled_from(ALL))
    def touch(self, block):
        self.store.touch([block.key])
        if block in self.plain:
            self.plain[block] = self.plain.pop(block)

    @rule(blocks=st.lists(st.sampled_from(ALL), max_size=3))
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

    @rule()
    def restart(self):
        self.store.close()
        self.open()

    @invariant()
    def agrees(self):
        if not hasattr(self, "plain"):
            return
        self.now += 1
        assert [entry.key for entry in self.store.entries()] == [block.key for block in self.plain]
        assert self.store.usage() == Usage(self.size_of(), len(self.plain), self.limits.capacity)
        assert self.store.contains_many([block.key for block in ALL]) == [block in self.plain for block in ALL]
        assert set(self.store.files.keys()) == {block.key for block in self.plain}

    def teardown(self):
        if hasattr(self, "plain"):
            self.store.close()
            shutil.rmtree(self.root)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


def test_only_this_user_may_look(directory):
    directory.mkdir(mode=0o755)
    put(DiskStore(directory, Limits(1 << 20)), ALL[0])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_is_refused(directory):
    if os.geteuid() == 0:
        directory.mkdir()
        os.chown(directory, 65534, 65534)
    else:
        directory = Path("/")
    with pytest.raises(ModelError, match=r"--disk-cache: .* belongs to another user"):
        DiskStore(directory, Limits(1 << 20))


def test_a_file_is_no_directory(directory):
    directory.write_text("")
    with pytest.raises(ModelError, match=r"--kv-store: .* is no directory"):
        DirectoryStore(directory)


def test_a_directory_of_other_things_is_left_as_it_is(directory):
    directory.mkdir(mode=0o755)
    (directory / "lost+found").mkdir()
    DirectoryStore(directory)
    shutil.rmtree(directory / "unfinished")
    directory.chmod(0o755)
    (directory / "letter.txt").write_text("Dear Bob")
    with pytest.raises(ModelError, match=r"--disk-cache: .* holds other things"):
        DiskStore(directory, Limits(1 << 20))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert sorted(os.listdir(directory)) == ["letter.txt", "lost+found"]


def test_entries_tell_of_uses(directory):
    now = 7.0
    store = DiskStore(directory, Limits(1 << 20), clock=lambda: now)
    put(store, ALL[0])
    now = 8.0
    for _ in range(40):
        store.get(ALL[0].key)
    store.touch([ALL[0].key])
    store.close()
    (entry,) = DiskStore(directory, Limits(1 << 20)).entries()
    assert entry == (ALL[0].key, "alice", SMALL, 8.0, 40, "evicted")


@pytest.mark.parametrize("damage", ["gone", "rubbish", "flipped", "version"])
def test_an_index_that_is_lost_is_made_anew_from_the_files(directory, damage):
    store = DiskStore(directory, Limits(1 << 20))
    for block in ALL:
        put(store, block)
    usage = store.usage()
    store.close()
    index = directory / "index.sqlite"
    if damage == "gone":
        index.unlink()
    elif damage == "rubbish":
        index.write_bytes(b"rubbish" * 1000)
    elif damage == "flipped":
        data = bytearray(index.read_bytes())
        for at in range(200, len(data), 50):
            data[at] ^= 0xFF
        index.write_bytes(data)
    else:
        with sqlite3.connect(index) as db:
            db.execute("PRAGMA user_version = 99")
    # These are no blocks.
    (directory / "ab").mkdir(exist_ok=True)
    (directory / "ab" / ("ab" * 16 + ".kv")).write_bytes(b"rubbish")
    (directory / "ab" / "note.txt").write_text("a note")
    shutil.copy(store.files.path(ALL[0].key), store.files.path(b"\xab" * 15 + b"c"))
    store = DiskStore(directory, Limits(1 << 20))
    assert store.usage() == usage
    assert {(entry.key, entry.tenant) for entry in store.entries()} == {(b.key, b.namespace.tenant) for b in ALL}
    assert store.erase("bob") == 8


def test_a_damage_while_serving_heals(directory):
    store = DiskStore(directory, Limits(1 << 20))
    for block in ALL[:8]:
        put(store, block)
    store.close()
    store = DiskStore(directory, Limits(1 << 20))
    index = directory / "index.sqlite"
    # Somebody else writes, so that the pages in memory are outdated.
    db = sqlite3.connect(index)
    db.execute("UPDATE blocks SET hits = 7")
    db.commit()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    index.write_bytes(b"x" * index.stat().st_size)
    assert FORM.decode(store.get(ALL[0].key), ALL[0])
    with pytest.raises(OSError, match="index"):
        put(store, ALL[9])
    assert put(store, ALL[9])
    db.close()
    assert store.usage().blocks == 9


def test_a_smaller_bound_holds_from_the_start(directory):
    store = DiskStore(directory, Limits(1 << 20))
    for block in ALL[:8]:
        put(store, block)
    store.close()
    store = DiskStore(directory, Limits(3 * SMALL))
    assert [entry.key for entry in store.entries()] == [block.key for block in ALL[5:8]]
    assert set(store.files.keys()) == {block.key for block in ALL[5:8]}


def test_a_file_that_vanished_is_a_miss_and_forgotten_later(directory):
    store = DiskStore(directory, Limits(1 << 20), clock=lambda: 0.0)
    put(store, ALL[0])
    store.files.path(ALL[0].key).unlink()
    assert store.get(ALL[0].key) is None
    assert store.contains_many([ALL[0].key]) == [False]
    store.close()
    assert DiskStore(directory, Limits(1 << 20), clock=lambda: 599.0).usage().blocks == 1, "it may be being written"
    assert DiskStore(directory, Limits(1 << 20), clock=lambda: 601.0).usage() == Usage(0, 0, 1 << 20)


def test_an_erasure_finds_what_the_index_does_not_know(directory):
    store = DiskStore(directory, Limits(1 << 20))
    for block in ALL[:10]:
        put(store, block)
    with store._writing() as index:
        index.delete([ALL[0].key])
    (directory / "unfinished" / "of-alice").write_bytes(b"".join(stored(ALL[0])))
    (directory / "unfinished" / "of-bob").write_bytes(b"".join(stored(ALL[8])))
    (directory / "unfinished" / "of-whom").write_bytes(b"RK")
    assert store.erase("alice") == 8
    assert os.listdir(directory / "unfinished") == ["of-bob"]
    assert store.contains_many([block.key for block in ALL[:10]]) == [False] * 8 + [True] * 2


def test_two_processes_keep_one_bound(directory):
    limits = Limits(6 * SMALL)

    def write(seed: int) -> None:
        rng = random.Random(seed)
        store = DiskStore(directory, limits)  # all of them open it for the first time
        for _ in range(100):
            block = rng.choice(ALL[:8])
            if rng.random() < 0.7:
                put(store, block)
            elif (data := store.get(block.key)) is not None:
                assert FORM.decode(data, block) == payload_of(block)[:100]
        store.close()

    children = [forked(lambda seed=seed: write(seed)) for seed in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    store = DiskStore(directory, limits, clock=lambda: time.time() + 3600)
    assert set(store.files.keys()) == {entry.key for entry in store.entries()}
    assert 0 < store.usage().bytes <= limits.capacity


def forked(work: Callable[[], None]) -> int:
    """Do something in a child; returns its pid."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def test_a_kill_leaves_nothing_that_is_believed(directory):
    limits = Limits(40 * 5000)
    space = Namespace("alice")

    def block_of(number: int) -> Block:
        ids = number.to_bytes(4, "little") * 16
        return Block(FORM.key(ROOT, space, ids), space, ids)

    def write(begin: int) -> None:
        store = DiskStore(directory, limits)
        for number in range(begin, begin + 1000):
            block = block_of(number)
            payload = bytes(payload_of(block) * 4)
            store.put(block.key, FORM.encode(block, payload), "alice", "evicted")

    rng = random.Random(1)
    files = BlockFiles(directory, "")
    for begin in range(0, 8000, 1000):
        own = {block_of(number).key for number in range(begin, begin + 1000)}
        child = forked(lambda begin=begin: write(begin))
        until = time.monotonic() + 60
        while len(own & set(files.keys())) < 3 and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    blocks = {block.key: block for block in map(block_of, range(8000))}
    store = DiskStore(directory, limits, clock=lambda: time.time() + 3600)
    keys = list(store.files.keys())
    assert len(keys) > 8
    for key in keys:
        assert FORM.decode(store.get(key), blocks[key]) == payload_of(blocks[key]) * 4
    assert store.usage().bytes == sum(store.files.path(key).stat().st_size for key in keys) <= limits.capacity
    for path in (directory / "unfinished").iterdir():
        os.utime(path, (0, 0))
    store.close()
    DiskStore(directory, limits)
    assert os.listdir(directory / "unfinished") == []


def test_a_full_disk_keeps_what_there_is(directory):
    store = DiskStore(directory, Limits(1 << 20))
    assert put(store, ALL[0])
    with little_room(1000), pytest.raises(OSError, match="index: disk I/O error"):
        put(store, ALL[1], 4000)
    with store._writing():
        pass
    # Room for the index, and none for the block.
    with little_room(200_000), pytest.raises(OSError, match="too large"):
        store.put(ALL[2].key, [bytes(300_000)], "alice", "evicted")
    assert FORM.decode(store.get(ALL[0].key), ALL[0])
    assert os.listdir(directory / "unfinished") == []
    assert store.usage() == Usage(SMALL, 1, 1 << 20)
    assert put(store, ALL[1])


@contextmanager
def without_rights(directory: Path):
    """This process may not write a directory, even if it is root's."""
    root = os.geteuid() == 0
    if root:
        for path in [directory.parent, directory, *directory.rglob("*")]:
            os.chown(path, 65534, 65534)
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o500)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in folders:
            path.chmod(0o700)


def test_a_read_only_directory_is_read(directory, caplog):
    store = DiskStore(directory, Limits(1 << 20))
    put(store, ALL[0])
    store.close()
    with without_rights(directory):
        store = DiskStore(directory, Limits(1 << 20))
        assert "nothing can be written" in caplog.text
        assert FORM.decode(store.get(ALL[0].key), ALL[0])
        for call in (
            lambda: put(store, ALL[1]),
            lambda: store.erase("alice"),
            lambda: store.delete([ALL[0].key]),
            store.usage,
        ):
            with pytest.raises(OSError, match=r"index|denied"):
                call()
        for _ in range(100):
            assert store.get(ALL[0].key) is not None
    assert put(store, ALL[1]), "it can be written again"
    assert store.usage().blocks == 2


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_the_same_door(directory, kind):
    store = DiskStore(directory, Limits(1 << 20)) if kind == "disk" else DirectoryStore(directory)
    for block in ALL:
        assert put(store, block)
    keys = [block.key for block in ALL]
    os.utime(directory / keys[0].hex()[:2] / f"{keys[0].hex()}.kv", (1, 1))
    assert store.contains_many([*keys, bytes(16)]) == [True] * len(keys) + [False]
    assert FORM.decode(store.get(keys[0]), ALL[0]) == payload_of(ALL[0])[:100]
    assert store.get(bytes(16)) is None
    store.touch([keys[0], bytes(16)])
    assert {entry.key for entry in store.entries()} == set(keys)
    assert {entry.tenant for entry in store.entries()} == set(TENANTS)
    assert all(entry.used > time.time() - 600 for entry in store.entries())
    assert store.usage()[:2] == (8 * sum(SIZES.values()), 24)
    store.delete([keys[0], bytes(16)])
    assert store.get(keys[0]) is None
    assert store.erase("alice") == 7
    assert store.erase(None) == 16
    assert list(store.entries()) == []
    store.close()
