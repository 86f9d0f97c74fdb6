"""A model directory appears whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def publish(work: Path, target: Path) -> None:
    """Rename `work`, in the same directory, to `target`: a rename is atomic, so other processes see all of it or none.

    Raises:
        OSError: if that cannot be done and no other process did it meanwhile.
    """
    try:
        os.rename(work, target)
    except OSError:
        if not (target / "config.json").exists():  # else another process was faster; its copy is as good
            raise
