"""Blocks on a disk of this machine, within a bound."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

from runtime.kv.tiers.block import BlockKey, Buffer, utf8
from runtime.kv.tiers.files import LEFT_S, BlockFiles
from runtime.kv.tiers.store import Entry, Limits, Usage

logger = logging.getLogger(__name__)

_TOUCHES = 32
_VERSION = 1
# Names of tenants are bytes, for they may be no valid Unicode. Totals are kept by triggers, so that servers agree.
_SCHEMA = f"""
CREATE TABLE blocks (key BLOB PRIMARY KEY, tenant BLOB NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL,
    hits INTEGER NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX by_use ON blocks (used);
CREATE INDEX by_tenant ON blocks (tenant, used);
CREATE TABLE totals (tenant BLOB PRIMARY KEY, size INTEGER NOT NULL, blocks INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER added AFTER INSERT ON blocks BEGIN
    INSERT INTO totals VALUES (new.tenant, new.size, 1)
        ON CONFLICT DO UPDATE SET size = size + new.size, blocks = blocks + 1;
END;
CREATE TRIGGER removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET size = size - old.size, blocks = blocks - 1 WHERE tenant = old.tenant;
END;
PRAGMA user_version = {_VERSION};
"""


class _Index:
    """Sizes, owners and times of the files, in SQLite; raises sqlite3.Error. The files say which blocks there are."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path, timeout=2.0, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self.transaction():
                if self._one("PRAGMA user_version") == 0:
                    for statement in _statements(_SCHEMA):
                        self._db.execute(statement)
            if self._one("PRAGMA user_version") != _VERSION or self._one("PRAGMA quick_check") != "ok":
                raise sqlite3.DatabaseError("damaged, or of another version")
        except sqlite3.Error:
            self._db.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _one(self, query: str, *values: object) -> object:
        row = self._db.execute(query, values).fetchone()
        return row and row[0]

    def put(self, entry: Entry) -> None:
        self.delete([entry.key])
        self._db.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", (entry.key, utf8(entry.tenant), *entry[2:]))

    def delete(self, keys: Iterable[BlockKey]) -> None:
        self._db.executemany("DELETE FROM blocks WHERE key = ?", ([key] for key in keys))

    def touch(self, touches: Iterable[tuple[BlockKey, float, int]]) -> None:
        values = ((used, hits, key) for key, used, hits in touches)
        self._db.executemany("UPDATE blocks SET used = ?, hits = hits + ? WHERE key = ?", values)

    def totals(self, tenant: str | None = None) -> tuple[int, int]:
        """Bytes and blocks of a tenant, or of all (None)."""
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (utf8(tenant),))
        query = f"SELECT coalesce(sum(size), 0), coalesce(sum(blocks), 0) FROM totals{where}"
        size, blocks = self._db.execute(query, values).fetchone()
        return size, blocks

    def oldest(self, excess: int, tenant: str | None = None) -> list[BlockKey]:
        """The least recently used blocks, of a tenant or of all (None), that hold `excess` bytes together."""
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (utf8(tenant),))
        found: list[BlockKey] = []
        if excess > 0:
            for key, size in self._db.execute(f"SELECT key, size FROM blocks{where} ORDER BY used, key", values):
                found.append(key)
                excess -= size
                if excess <= 0:
                    break
        return found

    def entries(self) -> list[Entry]:
        """From the least to the most recently used."""
        rows = self._db.execute("SELECT key, tenant, size, used, hits, reason FROM blocks ORDER BY used, key")
        return [Entry(key, str(tenant, "utf-8", "surrogatepass"), *rest) for key, tenant, *rest in rows]

    def close(self) -> None:
        self._db.close()


class DiskStore:
    """The most recently used blocks, each a file; several processes may share a directory.

    While its index cannot be written, blocks can be read, and `put` fails.

    Raises:
        ModelError: see `BlockFiles`.
    """

    name = "disk"
    outlives = True

    def __init__(
        self,
        directory: Path,
        limits: Limits,
        option: str = "--disk-cache",
        clock: Callable[[], float] = time.time,
    ):
        self.on_evict: Callable[[Iterable[BlockKey]], None] = lambda keys: None
        self.files = BlockFiles(directory, option)
        self._limits = limits
        self._clock = clock
        self._lock = RLock()
        self._touched: dict[BlockKey, tuple[float, int]] = {}
        self._index: _Index | None = None
        self._closed = False
        try:
            with self._writing():
                pass
        except OSError as error:
            logger.warning("%s: nothing can be written to %s: %s", option, directory, error)

    def _open(self) -> _Index:
        path = self.files.directory / "index.sqlite"
        with _alone(self.files.directory):
            try:
                index = _Index(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # busy, full or read-only
                    raise
                logger.warning("the index of the disk cache is made anew: %s", error)
                for suffix in ("", "-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                index = _Index(path)
            self._reconcile(index)
        return index

    def _reconcile(self, index: _Index) -> None:
        """Make the index say what there is, after a kill or a loss of power."""
        rows, files = {entry.key: entry for entry in index.entries()}, set(self.files.keys())
        # Another process may be about to write the file of a new row.
        lost = [key for key in rows.keys() - files if rows[key].used < self._clock() - LEFT_S]
        found = []
        for key in files - rows.keys():
            with suppress(FileNotFoundError):
                entry = self.files.entry(key)
                if isinstance(entry, Entry):
                    found.append(entry)
                else:
                    self.files.delete(key)
        with index.transaction():
            index.delete(lost)
            for entry in found:
                index.put(entry)
            over = index.oldest(index.totals()[0] - self._limits.capacity)
            index.delete(over)
        for key in over:
            self.files.delete(key)

    @contextmanager
    def _writing(self) -> Iterator[_Index]:
        """The index, within a transaction in which earlier uses are booked first; OSError if it cannot be written."""
        with self._lock:
            if self._closed:
                raise OSError("closed")
            try:
                self._index = self._index or self._open()
                with self._index.transaction():
                    touched, self._touched = self._touched, {}
                    self._index.touch((key, *use) for key, use in touched.items())
                    yield self._index
            except sqlite3.Error as error:
                if self._index is not None and not isinstance(error, sqlite3.OperationalError):
                    self._index.close()  # damaged: the next call makes it anew
                    self._index = None
                raise OSError(f"index: {error}") from error

    def contains_many(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.files for key in keys]

    def get(self, key: BlockKey) -> bytes | None:
        if (data := self.files.read(key)) is not None:
            self._use([key], hits=1)
        return data

    def touch(self, keys: Iterable[BlockKey]) -> None:
        self._use(keys, hits=0)

    def _use(self, keys: Iterable[BlockKey], hits: int) -> None:
        """Booked in the index now and then: a disk that cannot be written can still be read."""
        with self._lock:
            for key in keys:
                self._touched[key] = (self._clock(), self._touched.get(key, (0.0, 0))[1] + hits)
            if len(self._touched) >= _TOUCHES:
                with suppress(OSError), self._writing():
                    pass

    def put(self, key: BlockKey, buffers: Sequence[Buffer], tenant: str, reason: str) -> bool:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        quota = self._limits.of(tenant)
        if size > quota:
            return False
        # The room is booked before the file is written, so that processes that share it keep the bound.
        with self._writing() as index:
            index.delete([key])
            over = index.oldest(index.totals(tenant)[0] + size - quota, tenant)
            index.delete(over)
            more = index.oldest(index.totals()[0] + size - self._limits.capacity)
            index.delete(more)
            index.put(Entry(key, tenant, size, self._clock(), 0, reason))
        self.on_evict(over + more)
        try:
            for old in over + more:
                self.files.delete(old)
            self.files.write(key, buffers)
        except OSError:
            self.delete([key])
            raise
        return True

    def delete(self, keys: Iterable[BlockKey]) -> None:
        keys = list(keys)
        with self._writing() as index:
            index.delete(keys)
        for key in keys:
            self.files.delete(key)

    def erase(self, tenant: str | None) -> int:
        # By the files, for the index may have lost some.
        gone = self.files.erase(tenant)
        with self._writing() as index:
            index.delete(gone)
        return len(gone)

    def usage(self) -> Usage:
        with self._writing() as index:
            return Usage(*index.totals(), self._limits.capacity)

    def entries(self) -> Iterator[Entry]:
        with self._writing() as index:
            found = index.entries()
        yield from found

    def close(self) -> None:
        with suppress(OSError), self._writing():
            pass
        with self._lock:
            if self._index is not None:
                self._index.close()
            self._closed = True


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """No other process opens the index meanwhile: SQLite waits for nobody while a database becomes one with WAL."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, which `executescript` would run outside of a transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
