"""Atomic creation of directories in Ramet's cache."""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from runtime.errors import ModelError
from runtime.models.seals import holds, seal

log = logging.getLogger(__name__)

# Suffix of the directories. It is raised when a conversion changes, so that older results are not used.
FORMAT = 5
_SEAL = ".seal"


def provide(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the directory `target`; if it is missing, or one of its files is damaged, `make` creates its contents.

    `make` fills an empty directory, which is renamed to `target` when all files are on disk. It may use the parent of
    this directory for temporary files, which are removed.

    Raises:
        ModelError: raised by `make`, or if `target` cannot be written.
    """
    is_damaged = (target / _SEAL).exists() and not holds(target / _SEAL)
    if target.is_dir() and not is_damaged:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent, ".making-") as directory:
            work = directory / "work"
            work.mkdir()
            make(work)
            seal(work / _SEAL, list(work.iterdir()))
            if is_damaged:
                log.warning("%s was damaged, and is made again", target)
                target.rename(directory / "damaged")
            for path in work.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            try:
                work.rename(target)
            except OSError:
                if not target.is_dir():  # otherwise another process has published an equal copy
                    raise
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"cannot write {target}: {reason}; $RAMET_CACHE sets another directory") from None
    return target


def reserve(file: BinaryIO, size: int) -> None:
    """Give a new file `size` zeros that have their place on the disk. Raises OSError if it is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    block = bytes(min(size, 1 << 20))  # macOS: only what is written has a place
    for at in range(0, size, len(block)):
        file.write(block[: size - at])
    file.flush()


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A new private directory in `parent`, removed at the end. Also removes directories of killed processes.

    The owner locks a file in the directory. The system releases this lock when the owner ends, however it ends.
    """
    for remains in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (remains / "lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(remains)
    # Lock the directory before it gets the prefix for which other processes search.
    directory = Path(tempfile.mkdtemp(prefix=f"new{prefix}", dir=parent))
    try:
        with (directory / "lock").open("wb") as lock:
            with contextlib.suppress(OSError):  # without locks, directories of killed processes stay
                fcntl.flock(lock, fcntl.LOCK_EX)
            directory = directory.rename(parent / directory.name.removeprefix("new"))
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
