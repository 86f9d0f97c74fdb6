"""A file for each block, in a directory of this user alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from runtime.errors import ModelError
from runtime.kv.tiers.block import HEAD_BYTES, BlockKey, Buffer, Head, Mismatch, read_head
from runtime.kv.tiers.store import Entry, Usage

# A writer that still lives has renamed its file long before.
LEFT_S = 600.0
USAGE_EVERY_S = 600.0
_SUFFIX = ".kv"


# Beginning of the names of files in which engines note what their next start loads.
NOTES = "resume-"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file of this user alone, which is as it was until all of it is on the disk. Raises OSError."""
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


class BlockFiles:
    """Reads and writes blocks as files; its methods raise OSError.

    A file has its name once all of it is written. It is not synced: what a loss of power cuts is no block by its
    checksum, and costs no more than a block that was never written.

    Args:
        directory: made if it is not there.
        option: names it in errors.

    Raises:
        ModelError: if there is no directory, it is somebody else's, or holds other things.
    """

    def __init__(self, directory: Path, option: str):
        self.directory = directory
        self._unfinished = directory / "unfinished"
        names = set(os.listdir(directory)) if directory.is_dir() else set()
        if self._unfinished.name not in names and names - {"lost+found"}:
            raise ModelError(f"{option}: {directory} holds other things than blocks")
        with suppress(OSError):  # one that cannot be written can still be read
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (mode := directory.stat().st_mode) & 0o077:
                directory.chmod(mode & 0o700)
            self._unfinished.mkdir(mode=0o700, exist_ok=True)
        if not directory.is_dir():
            raise ModelError(f"{option}: {directory} is no directory, and none can be made there")
        if directory.stat().st_uid != os.geteuid():
            raise ModelError(f"{option}: {directory} belongs to another user, who could read prompts in it")
        self._sweep()

    def _sweep(self) -> None:
        """Delete what killed writers left."""
        for path in self._left():
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - LEFT_S:
                    path.unlink()

    def _left(self) -> list[Path]:
        return list(self._unfinished.iterdir()) if self._unfinished.is_dir() else []

    def path(self, key: BlockKey) -> Path:
        name = key.hex()
        return self.directory / name[:2] / (name + _SUFFIX)

    def __contains__(self, key: BlockKey) -> bool:
        return self.path(key).exists()

    def read(self, key: BlockKey) -> bytes | None:
        try:
            with open(self.path(key), "rb", buffering=0) as file:
                return file.readall()
        except FileNotFoundError:
            return None

    def write(self, key: BlockKey, buffers: Iterable[Buffer]) -> None:
        path = self.path(key)
        unfinished = self._unfinished / token_hex(8)
        try:
            with open(unfinished, "xb", buffering=0) as file:
                for buffer in buffers:
                    view = memoryview(buffer).cast("B")
                    while view:
                        view = view[file.write(view) :]
            path.parent.mkdir(mode=0o700, exist_ok=True)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def delete(self, key: BlockKey) -> bool:
        try:
            self.path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def touch(self, key: BlockKey) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.path(key))

    def keys(self) -> Iterator[BlockKey]:
        for folder in sorted(self.directory.glob("[0-9a-f][0-9a-f]")):
            for name in sorted(os.listdir(folder)):
                with suppress(ValueError):
                    yield bytes.fromhex(name.removesuffix(_SUFFIX))

    def entry(self, key: BlockKey) -> Entry | Mismatch:
        """A file by its head and its size; FileNotFoundError if there is none."""
        path = self.path(key)
        head, status = _head(path), path.stat()
        if isinstance(head, Mismatch):
            return head
        if head.key != key:
            return Mismatch.KEY
        if head.num_bytes != status.st_size:
            return Mismatch.TRUNCATED
        return Entry(key, head.tenant, status.st_size, status.st_mtime, 0, "found")

    def entries(self) -> Iterator[Entry]:
        """The files that look like blocks."""
        for key in self.keys():
            with suppress(FileNotFoundError):
                if isinstance(entry := self.entry(key), Entry):
                    yield entry

    def erase(self, tenant: str | None) -> list[BlockKey]:
        """Delete the files of a tenant, or all (None), and those that are being written; returns their keys."""
        for path in self._left():
            if _is_of(tenant, path):
                path.unlink(missing_ok=True)
        gone = [key for key in self.keys() if _is_of(tenant, self.path(key))]
        return [key for key in gone if self.delete(key)]


def _is_of(tenant: str | None, path: Path) -> bool:
    """Whether a file is a tenant's, or nobody can tell."""
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


class DirectoryStore:
    """A directory that replicas share, on a file system that need not know locks.

    Nobody bounds it: `ramet cache purge` does, by the times of last use, which are the files'.
    """

    name = "store"
    outlives = True

    def __init__(self, directory: Path, option: str = "--kv-store"):
        self._files = BlockFiles(directory, option)
        self._usage = Usage(0, 0, None)
        self._usage_at = -USAGE_EVERY_S

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self._files for key in keys]

    def get(self, key: BlockKey) -> bytes | None:
        data = self._files.read(key)
        if data is not None:
            with suppress(OSError):
                self._files.touch(key)
        return data

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str, reason: str) -> bool:
        self._files.write(key, buffers)
        return True

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._files.touch(key)

    def delete(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._files.delete(key)

    def erase(self, tenant: str | None) -> int:
        return len(self._files.erase(tenant))

    def usage(self) -> Usage:
        """Counted every ten minutes, for it reads the whole directory."""
        if time.monotonic() - self._usage_at >= USAGE_EVERY_S:
            self._usage_at = time.monotonic()
            sizes = [entry.size for entry in self._files.entries()]
            self._usage = Usage(sum(sizes), len(sizes), None)
        return self._usage

    def entries(self) -> Iterator[Entry]:
        return self._files.entries()

    def close(self) -> None:
        """Nothing is open."""
