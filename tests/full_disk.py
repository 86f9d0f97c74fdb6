"""A disk without room, without a disk of one's own."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def little_room(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes meanwhile: the system refuses the write that would do it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
