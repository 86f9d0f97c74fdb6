"""Atomic publishing of directories that Ramet makes, with checksums that every start verifies."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from runtime.errors import ModelError

CHECKSUMS = "checksums.json"

# Suffix of made directories: raised when a conversion changes, so that older results are not used.
FORMAT = 2


def provide(target: Path, make: Callable[[Path], None]) -> Path:
    """The directory `target`, which `make` fills if it is missing or damaged.

    `make` gets an empty directory, which becomes `target` once complete. Temporary files beside it are removed.

    Raises:
        ModelError: as `make`, or if `target` cannot be written.
    """
    existed = target.exists()
    if (damage := find_damage(target, target / CHECKSUMS)) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent, ".making-") as directory:
            if existed:
                print(f"{damage} is damaged or missing: {target} is made again", file=sys.stderr, flush=True)
                with contextlib.suppress(FileNotFoundError):  # another process also found the damage
                    target.rename(directory / "damaged")
            work = directory / "work"
            work.mkdir()
            make(work)
            write_checksums(work, work / CHECKSUMS)
            _publish(work, target)
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"cannot write {target}: {reason}; --cache-dir sets another directory") from None
    return target


def _publish(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        if find_damage(target, target / CHECKSUMS) is not None:  # otherwise another process published an equal copy
            raise


def write_checksums(directory: Path, path: Path) -> None:
    """Write the digests (XXH3, 128 bits) of the files of `directory` by their names to `path`."""
    digests = {file.name: _digest(file) for file in sorted(directory.iterdir()) if file.is_file()}
    path.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def find_damage(directory: Path, checksums: Path) -> Path | None:
    """The first missing or changed file of `directory`, or `checksums` itself if it cannot be read."""
    try:
        expected = dict(json.loads(checksums.read_bytes()))
    except (OSError, TypeError, ValueError):
        return checksums
    return next((directory / name for name, digest in expected.items() if _digest(directory / name) != digest), None)


def _digest(path: Path) -> str | None:
    """The digest of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError:
        return None


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A new private directory in `parent`, removed at the end, as are directories of killed processes.

    The owner holds a lock in it, which the system releases when the owner ends in any way.
    """
    for remains in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (remains / "lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(remains)
    # Locked before it gets the name that others look for.
    directory = Path(tempfile.mkdtemp(prefix=f"new{prefix}", dir=parent))
    try:
        with (directory / "lock").open("wb") as lock:
            with contextlib.suppress(OSError):  # without locks, directories of killed processes stay
                fcntl.flock(lock, fcntl.LOCK_EX)
            directory = directory.rename(parent / directory.name.removeprefix("new"))
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
