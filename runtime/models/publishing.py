"""Atomic publishing of directories that Ramet makes."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.errors import ModelError

# Suffix of made directories: raised when a conversion changes, so that older results are not used.
FORMAT = 2


def provide(target: Path, make: Callable[[Path], None]) -> Path:
    """The directory `target`, which `make` fills if it is missing.

    `make` gets an empty directory, which becomes `target` once its files are complete and on disk. Temporary files
    beside it are removed.

    Raises:
        ModelError: as `make`, or if `target` cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent, ".making-") as directory:
            work = directory / "work"
            work.mkdir()
            make(work)
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
