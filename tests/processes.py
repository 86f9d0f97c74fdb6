"""Processes that are not this one's children."""

import time
from contextlib import suppress
from pathlib import Path


def wait_for_end(pid: int, seconds: float = 120.0) -> None:
    """Until a process has ended, be it that nobody has asked for its exit code yet."""
    deadline = time.monotonic() + seconds
    with suppress(OSError):  # it is gone, perhaps while it is looked at
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)
