"""Blocks as files: whose directory it is, several processes, kills, and disks that refuse."""

import errno
import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from radix import Namespace
from runtime.errors import ModelError
from runtime.features.tiers.block import ROOT, Mismatch, TierBlock
from runtime.features.tiers.files import FileStore
from runtime.features.tiers.store import Usage
from tests.full_disk import little_room
from tests.runtime.features.tiers.conftest import FORM, MEMORY, blocks_of, payload_of, put_block, stored

BLOCKS = [*blocks_of("alice", 8), *blocks_of("bob", 8)]
SMALL = len(b"".join(stored(BLOCKS[0])))
BOUND = 1 << 20


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path) / "cache"


def disk(directory: Path, capacity: int = BOUND, **options) -> FileStore:
    return FileStore(directory, "--disk-cache", capacity, **options)


def shared(directory: Path) -> FileStore:
    return FileStore(directory, "--kv-store")


# -- the directory -------------------------------------------------------------------------------------------


def test_only_this_user_may_look(directory):
    before = os.umask(0)
    try:
        disk(directory / "new")
        (directory / "old").mkdir(mode=0o755)
        store = disk(directory / "old")
        put_block(store, BLOCKS[0])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    assert (modes.pop("new"), modes.pop("old")) == (0o700, 0o755), "a directory that was there keeps its mode"
    assert len(modes) == 4, "a file, a lock and folders"
    assert all(mode & 0o077 == 0 for mode in modes.values())


def test_a_directory_of_another_user_is_refused(directory):
    if os.geteuid() == 0:
        directory.mkdir()
        os.chown(directory, 65534, 65534)
    else:
        directory = Path("/")
    with pytest.raises(ModelError, match=r"--disk-cache: .* belongs to another user"):
        disk(directory)


def test_a_file_is_not_a_directory(directory):
    directory.write_text("")
    with pytest.raises(ModelError, match=r"--kv-store: .* is not a directory"):
        shared(directory)


def test_a_directory_of_other_things_stays_as_it_is(directory):
    directory.mkdir(mode=0o755)
    for name in "lost+found", ".Trashes":
        (directory / name).mkdir()
    (directory / ".DS_Store").write_bytes(b"")
    shared(directory)
    shutil.rmtree(directory / "unfinished")
    directory.chmod(0o755)
    (directory / "letter.txt").write_text("Dear Bob")
    with pytest.raises(ModelError, match=r"--disk-cache: .* holds other things"):
        disk(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert sorted(os.listdir(directory)) == [".DS_Store", ".Trashes", "letter.txt", "lost+found"]


# -- what the files say --------------------------------------------------------------------------------------


def test_a_file_that_is_not_a_block_is_deleted_from_a_bounded_directory(directory):
    store = disk(directory)
    for block in BLOCKS:
        put_block(store, block)
    usage = store.usage()
    (directory / "ab").mkdir(exist_ok=True)
    rubbish, note = directory / "ab" / ("ab" * 16 + ".kv"), directory / "ab" / "note.txt"
    rubbish.write_bytes(b"rubbish")
    note.write_text("a note")
    other = b"\xab" * 15 + b"c"
    copy = store.path(other)
    shutil.copy(store.path(BLOCKS[0].key), copy)
    os.truncate(store.path(BLOCKS[1].key), SMALL - 1)
    assert shared(directory).entry(other) is Mismatch.KEY
    assert shared(directory).entry(BLOCKS[1].key) is Mismatch.TRUNCATED
    assert {entry.key for entry in shared(directory).entries()} == {block.key for block in BLOCKS} - {BLOCKS[1].key}
    again = disk(directory)
    assert again.usage() == Usage(usage.bytes - SMALL, 15, BOUND)
    assert [path.exists() for path in (rubbish, note, copy)] == [False, True, False]


def test_a_smaller_bound_holds_from_the_start(directory):
    now = 7.0
    store = disk(directory, clock=lambda: now)
    for block in BLOCKS[:8]:
        now += 1.0
        put_block(store, block)
    store = disk(directory, 3 * SMALL)
    assert store.usage() == Usage(3 * SMALL, 3, 3 * SMALL)
    assert set(store.keys()) == {block.key for block in BLOCKS[5:8]}


def test_an_erasure_finds_files_that_are_being_written(directory):
    store = disk(directory)
    for block in BLOCKS[:10]:
        put_block(store, block)
    (directory / "unfinished" / "of-alice").write_bytes(b"".join(stored(BLOCKS[0])))
    (directory / "unfinished" / "of-bob").write_bytes(b"".join(stored(BLOCKS[8])))
    (directory / "unfinished" / "of-whom").write_bytes(b"RK")
    assert store.erase("alice") == 8
    assert os.listdir(directory / "unfinished") == ["of-bob"]
    assert store.contains_many([block.key for block in BLOCKS[:10]]) == [False] * 8 + [True] * 2


def test_the_usage_of_a_shared_directory_is_counted_now_and_then(directory):
    store = shared(directory)
    assert store.usage() == Usage(0, 0, None)
    put_block(store, BLOCKS[0])
    assert store.usage() == Usage(0, 0, None)
    store._usage_at -= 600
    assert store.usage() == Usage(SMALL, 1, None)


# -- several processes ---------------------------------------------------------------------------------------


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


def test_processes_keep_one_bound_and_know_each_others_blocks(directory):
    def write(seed: int) -> None:
        rng = random.Random(seed)
        store = disk(directory, 6 * SMALL)  # all of them open it for the first time
        evicted: set[bytes] = set()
        store.on_evict = evicted.update
        for _ in range(100):
            block = rng.choice(BLOCKS[:8])
            if rng.random() < 0.7:
                put_block(store, block)
                usage = store.usage()
                assert usage.bytes == SMALL * usage.blocks <= 6 * SMALL
            elif (data := store.get(block.key)) is not None:
                assert FORM.decode(data, block) == payload_of(block)
        assert evicted

    children = [forked(lambda seed=seed: write(seed)) for seed in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    store = disk(directory, 6 * SMALL)
    keys = list(store.keys())
    assert store.usage() == Usage(SMALL * len(keys), len(keys), 6 * SMALL)
    assert 1 <= len(keys) <= 6


def test_what_another_process_deletes_takes_no_room(directory):
    one, other, gone = disk(directory), disk(directory), []
    one.on_evict = gone.extend
    for block in BLOCKS[:3]:
        put_block(one, block)
        other.delete([block.key])
        assert one.usage() == Usage(0, 0, BOUND)
    assert gone == [block.key for block in BLOCKS[:3]]


def test_a_kill_leaves_nothing_that_is_believed(directory):
    bound, space = 40 * 5000, Namespace("alice")

    def block_of(number: int) -> TierBlock:
        ids = number.to_bytes(4, "little") * 16
        return TierBlock(FORM.key(ROOT, space, ids), space, ids)

    def write(begin: int) -> None:
        store = disk(directory, bound)
        for number in range(begin, begin + 1000):
            put_block(store, block_of(number), payload_of(block_of(number)) * 4)

    files = shared(directory)
    for begin in range(0, 8000, 1000):
        own = {block_of(number).key for number in range(begin, begin + 1000)}
        child = forked(lambda begin=begin: write(begin))
        until = time.monotonic() + 60
        while len(own & set(files.keys())) < 3 and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    blocks = {block.key: block for block in map(block_of, range(8000))}
    store = disk(directory, bound)
    assert store.usage().bytes <= bound
    keys = list(store.keys())
    assert len(keys) > 8
    for key in keys:
        assert FORM.decode(store.get(key), blocks[key]) == payload_of(blocks[key]) * 4
    assert store.usage().bytes == sum(store.path(key).stat().st_size for key in keys)
    for path in (directory / "unfinished").iterdir():
        os.utime(path, (0, 0))
    disk(directory)
    assert os.listdir(directory / "unfinished") == []


# -- disks that refuse ---------------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_there_is(directory):
    store = disk(directory)
    assert put_block(store, BLOCKS[0])
    with little_room(10_000), pytest.raises(OSError, match="too large"):
        put_block(store, BLOCKS[1], bytes(20_000))
    assert FORM.decode(store.get(BLOCKS[0].key), BLOCKS[0])
    assert os.listdir(directory / "unfinished") == []
    assert store.usage() == Usage(SMALL, 1, BOUND)
    assert put_block(store, BLOCKS[1])


class SmallDisk(FileStore):
    """On a disk that has room for three blocks."""

    def _write(self, key, buffers, now):
        if sum(file.stat().st_size for file in self.directory.rglob("*.kv")) + SMALL > 3 * SMALL:
            raise OSError(errno.ENOSPC, "no space left")
        super()._write(key, buffers, now)


def test_on_a_full_disk_the_oldest_blocks_make_room(directory):
    store, clock = SmallDisk(directory, "--disk-cache", BOUND), iter(range(1000, 2000))
    store._clock, evicted = lambda: next(clock), []
    store.on_evict = evicted.extend
    for block in BLOCKS[:3]:
        put_block(store, block)
    store.touch([BLOCKS[0].key])
    assert put_block(store, BLOCKS[3])
    assert evicted == [BLOCKS[1].key]
    assert store.contains_many([block.key for block in BLOCKS[:4]]) == [True, False, True, True]
    assert store.usage() == Usage(3 * SMALL, 3, BOUND)


def test_a_disk_that_others_fill_keeps_most_blocks(directory, monkeypatch):
    store = disk(directory)
    for block in BLOCKS:
        put_block(store, block)
    monkeypatch.setattr(store, "_write", lambda *_: Path("/dev/full").write_bytes(b"x"))
    other = blocks_of("carol", 1)[0]
    with pytest.raises(OSError, match="No space left"):
        put_block(store, other)
    assert store.usage().blocks == len(BLOCKS) - 2


@contextmanager
def without_rights(directory: Path):
    """This process may not write a directory, even if it runs as root."""
    root = os.geteuid() == 0
    if root:
        for path in [directory.parent, directory, *directory.rglob("*")]:
            os.chown(path, 65534, 65534)
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    (directory / "lock").chmod(0o400)
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
        (directory / "lock").chmod(0o600)


def test_a_read_only_directory_is_read(directory, caplog):
    put_block(disk(directory), BLOCKS[0])
    (directory / "unfinished" / "old").touch()
    os.utime(directory / "unfinished" / "old", (0, 0))
    with without_rights(directory):
        store = disk(directory)
        assert "cannot be written to" in caplog.text
        for call in (
            lambda: put_block(store, BLOCKS[1]),
            lambda: store.erase("alice"),
            lambda: store.delete([BLOCKS[0].key]),
            store.usage,
        ):
            with pytest.raises(OSError, match="denied"):
                call()
        assert FORM.decode(store.get(BLOCKS[0].key), BLOCKS[0])
    assert put_block(store, BLOCKS[1]), "it can be written again"
    assert store.usage().blocks == 2
