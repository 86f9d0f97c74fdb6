"""Seals: digests of files in Ramet's cache, by which a damaged file is noticed and made again."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash


class _Sealed(msgspec.Struct, array_like=True):
    """A file's digest (XXH3, 128 bits), and its state when its content was last found to have it."""

    digest: str
    state: tuple[int, int, int]


def seal(path: Path, files: Iterable[Path]) -> None:
    """Write the seal `path` of files, which lie in its directory. They may be moved together. Raises OSError."""
    _write(path, {file.name: _Sealed(_digest(file), _state(file)) for file in files})


def holds(path: Path) -> bool:
    """Whether there is a seal `path`, and all its files have their content.

    A file is read only if it is another one, or has been written to, since the last time.
    """
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=dict[str, _Sealed])
        moved = [
            (path.with_name(name), one) for name, one in sealed.items() if _state(path.with_name(name)) != one.state
        ]
        for file, one in moved:
            one.state = _state(file)
            if _digest(file) != one.digest:
                return False
    except (OSError, msgspec.MsgspecError):
        return False
    if moved:
        with suppress(OSError):  # in a cache that cannot be written to, they are read each time
            _write(path, sealed)
    return True


def _write(path: Path, sealed: dict[str, _Sealed]) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(msgspec.json.encode(sealed))
    new.replace(path)


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
