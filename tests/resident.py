"""What processes have in memory."""

import resource
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """The memory of a process; 0 where the system is not Linux."""
    statm = Path(f"/proc/{pid}/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
