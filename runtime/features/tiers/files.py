"""A store of blocks as files, one for each block, which only this user may read."""

import errno
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_bytes, token_hex
from threading import Lock

from runtime.errors import ModelError
from runtime.features.tiers.block import HEAD_BYTES, BlockKey, Buffer, Head, Mismatch, read_head
from runtime.features.tiers.store import Contents, StoredBlock, Usage, size_of

logger = logging.getLogger(__name__)

USAGE_EVERY_S = 600.0
# Age of an unfinished file whose writer must have ended: a running writer renames its file much sooner.
_ABANDONED_S = 600.0
# Coarsest resolution of the time stamps of directories.
_TICK_NS = 50_000_000
# Error of a time stamp: a block that is younger than its known use by more than this was used by another process.
_LATER_S = 1.0
# Most uses to remember until the next write.
_MOST_USES = 1 << 16
_FOLDERS = [f"{number:02x}" for number in range(256)]
_SUFFIX = ".kv"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What Linux and macOS put into the uppermost directory of a volume, or into any.
_OF_SYSTEMS = {"lost+found", ".DS_Store", ".Spotlight-V100", ".Trashes", ".fseventsd"}

# Prefix of the names of files in which engines note their pins for the next start.
NOTES = "pins-"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that only this user may read. It keeps its old content until the new one is on disk; OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


class FileStore:
    """A directory of blocks: a bounded cache on one machine's disk, or an unbounded store that replicas share.

    A file gets its final name once it is complete. Its modification time is its last use. Files are not synced: a block
    that a power failure has cut short fails its checksum, and is a miss.

    Readers take no lock. Processes that share a bounded directory write one after another, under a file lock, which
    local file systems support. Before it writes, a process looks for files that others have added or deleted. So all
    processes keep the same bound, and there is no index to store or repair.

    Args:
        directory: made if it does not exist.
        option: the option that names the directory, for errors.
        capacity: largest number of bytes of all blocks; None: no bound, `ramet cache purge` makes room.

    Raises:
        ModelError: if the directory cannot be made, belongs to another user, or holds other files than blocks.
    """

    outlives = True

    def __init__(
        self,
        directory: Path,
        option: str,
        capacity: int | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.name = "store" if capacity is None else "disk"
        self.directory = directory
        self.on_evict: Callable[[Iterable[BlockKey]], None] = lambda keys: None
        self._clock = clock
        self._unfinished = directory / "unfinished"
        self._contents = None if capacity is None else Contents(capacity)
        self._lock = Lock()
        self._version: bytes | None = None  # of the directory, when `_contents` was last compared with it
        self._folders: dict[str, tuple[int, set[BlockKey]]] = {}
        self._used: deque[tuple[BlockKey, float]] = deque(maxlen=_MOST_USES)
        self._usage, self._usage_at = Usage(0, 0, None), -USAGE_EVERY_S
        self._open(option)

    def _open(self, option: str) -> None:
        directory = self.directory
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not directory.is_dir():
            raise ModelError(f"{option}: {directory} is not a directory, and none can be made there")
        if directory.stat().st_uid != os.geteuid():
            raise ModelError(f"{option}: {directory} belongs to another user, who could read prompts in it")
        names = set(os.listdir(directory))
        if self._unfinished.name not in names and names - _OF_SYSTEMS:
            raise ModelError(f"{option}: {directory} holds other things than blocks")
        try:
            self._unfinished.mkdir(mode=0o700, exist_ok=True)
            for path in self._unfinished.iterdir():  # of killed writers
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - _ABANDONED_S:
                        path.unlink()
        except OSError as error:  # its blocks can still be read
            logger.warning("%s: %s cannot be written to: %s", option, directory, error)

    # -- reading ---------------------------------------------------------------------------------------------

    def path(self, key: BlockKey) -> Path:
        name = key.hex()
        return self.directory / name[:2] / (name + _SUFFIX)

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self.path(key).exists() for key in keys]

    def read(self, key: BlockKey) -> bytes | None:
        """The bytes of a block, without marking it as used; None if it is missing."""
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                return file.readall()
        except FileNotFoundError:
            return None

    def get(self, key: BlockKey) -> bytes | None:
        if (data := self.read(key)) is not None:
            with suppress(OSError):  # a disk that cannot be written to can be read
                self.touch([key])
        return data

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            now = self._clock()
            with suppress(FileNotFoundError):
                os.utime(self.path(key), (now, now))
                if self._contents is not None:
                    self._used.append((key, now))

    def keys(self) -> Iterator[BlockKey]:
        for folder in _FOLDERS:
            yield from sorted(self._keys_in(folder))

    def _keys_in(self, folder: str) -> set[BlockKey]:
        try:
            names = os.listdir(self.directory / folder)
        except FileNotFoundError:
            return set()
        keys = set()
        for name in names:
            with suppress(ValueError):
                keys.add(bytes.fromhex(name.removesuffix(_SUFFIX)))
        return keys

    def entry(self, key: BlockKey) -> StoredBlock | Mismatch:
        """A block's description, from its head and file size. Raises FileNotFoundError if it is missing."""
        path = self.path(key)
        head, status = _head(path), path.stat()
        if isinstance(head, Mismatch):
            return head
        if head.key != key:
            return Mismatch.KEY
        if head.num_bytes != status.st_size:
            return Mismatch.TRUNCATED
        return StoredBlock(key, head.tenant, status.st_size, status.st_mtime)

    def entries(self) -> Iterator[StoredBlock]:
        """Descriptions of all files that look like blocks."""
        for key in self.keys():
            with suppress(FileNotFoundError):
                if isinstance(entry := self.entry(key), StoredBlock):
                    yield entry

    def usage(self) -> Usage:
        """Number and size of the blocks. Without a bound, they are counted every ten minutes, which reads all heads."""
        contents = self._contents
        if contents is not None:
            with self._alone():
                self._compare(contents)
                return Usage(contents.num_bytes, len(contents), contents.capacity)
        if time.monotonic() - self._usage_at >= USAGE_EVERY_S:
            self._usage_at = time.monotonic()
            sizes = [entry.size for entry in self.entries()]
            self._usage = Usage(sum(sizes), len(sizes), None)
        return self._usage

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str) -> bool:
        contents = self._contents
        if contents is None:
            self._write(key, buffers, self._clock())
            return True
        size = size_of(buffers)
        if size > contents.capacity:
            return False
        with self._alone():
            self._remove(key)
            while (victim := contents.victim(size)) is not None:
                self._evict(contents, victim)
            entry = StoredBlock(key, tenant, size, self._clock())
            self._write_with_room(contents, entry, buffers)
            contents.add(entry)
            self._folders[key.hex()[:2]][1].add(key)
        return True

    def _write_with_room(self, contents: Contents, entry: StoredBlock, buffers: Sequence[Buffer]) -> None:
        """Write a block. On a full disk, older blocks make room, until the block has found none a few times."""
        for is_last in (False, False, True):
            try:
                return self._write(entry.key, buffers, entry.used)
            except OSError as error:
                if error.errno not in _FULL or is_last or not len(contents):
                    raise
            left = contents.num_bytes - entry.size
            while contents.num_bytes > left and (victim := contents.victim(contents.capacity)) is not None:
                self._evict(contents, victim)

    def _write(self, key: BlockKey, buffers: Iterable[Buffer], now: float) -> None:
        path, unfinished = self.path(key), self._unfinished / token_hex(8)
        try:
            with open(unfinished, "xb", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                for buffer in buffers:
                    view = memoryview(buffer).cast("B")
                    while view:
                        view = view[file.write(view) :]
                os.utime(file.fileno(), (now, now))
            path.parent.mkdir(mode=0o700, exist_ok=True)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _evict(self, contents: Contents, victim: StoredBlock) -> None:
        """Delete a block, unless another process has used it recently."""
        with suppress(FileNotFoundError):
            used = self.path(victim.key).stat().st_mtime
            if used > victim.used + _LATER_S:
                contents.use(victim.key, used)
                return
        self._remove(victim.key)
        self.on_evict([victim.key])

    def _remove(self, key: BlockKey) -> bool:
        """Delete a file; returns whether it existed."""
        if self._contents is not None:
            self._contents.remove(key)
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def delete(self, keys: Iterable[BlockKey]) -> None:
        with self._alone():
            for key in keys:
                self._remove(key)

    def erase(self, tenant: str | None) -> int:
        """See `BlockStore`; also deletes unfinished files, and files whose tenant cannot be read."""
        for path in list(self._unfinished.iterdir()):
            if _is_of(tenant, path):
                path.unlink(missing_ok=True)
        with self._alone():
            return sum(self._remove(key) for key in self.keys() if _is_of(tenant, self.path(key)))

    def close(self) -> None:
        """Does nothing: no file is open."""

    # -- several processes -----------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock a bounded directory against writes of other processes, after noting what they have changed."""
        if self._contents is None:
            yield
            return
        with self._lock:
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.pread(lock, 16, 0) != self._version:
                    self._compare(self._contents)
                version = token_bytes(16)
                os.pwrite(lock, version, 0)
                self._version = version
                while self._used:
                    self._contents.use(*self._used.popleft())
                yield
            finally:
                os.close(lock)

    def _compare(self, contents: Contents) -> None:
        """Note which files were added and deleted since the last call. Reads only the folders that have changed."""
        added: list[StoredBlock] = []
        for folder in _FOLDERS:
            before, known = self._folders.get(folder, (-1, set()))
            try:
                changed = (self.directory / folder).stat().st_mtime_ns
            except FileNotFoundError:
                changed = 0
            if changed == before:
                continue
            # A folder that has just changed may change again within the same tick.
            settled = changed < time.time_ns() - _TICK_NS
            keys = self._keys_in(folder)
            self._folders[folder] = changed if settled else -1, keys
            if gone := [key for key in known - keys if contents.remove(key)]:
                self.on_evict(gone)
            for key in keys:
                if key not in contents:
                    added += self._checked(key)
        for entry in sorted(added, key=lambda entry: entry.used):
            contents.add(entry)
        while (victim := contents.victim(0)) is not None:
            self._evict(contents, victim)

    def _checked(self, key: BlockKey) -> list[StoredBlock]:
        """The description of a new file; a file that is not a block is deleted."""
        with suppress(FileNotFoundError):
            entry = self.entry(key)
            if isinstance(entry, StoredBlock):
                return [entry]
            self._remove(key)
        return []


def _is_of(tenant: str | None, path: Path) -> bool:
    """Whether a file belongs to a tenant, or its tenant cannot be read."""
    if tenant is None:
        return True
    try:
        head = _head(path)
    except FileNotFoundError:
        return False
    return not isinstance(head, Head) or head.tenant == tenant


def _head(path: Path) -> Head | Mismatch:
    with open(path, "rb", buffering=0) as file:
        begin = file.read(HEAD_BYTES)
        head = read_head(begin)
        return read_head(begin + file.readall()) if head is Mismatch.TRUNCATED else head
