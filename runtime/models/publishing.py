"""Atomic publication of model directories."""

from __future__ import annotations

import os
from pathlib import Path


def publish(work: Path, target: Path) -> None:
    """Rename `work` to `target`, in the same directory, so that other processes see a complete directory or none.

    Raises:
        OSError: if the rename fails and no other process has published `target`.
    """
    try:
        os.rename(work, target)
    except OSError:
        if not (target / "config.json").exists():  # else another process has published an equal copy
            raise
