"""Files of lines that users bring."""

import gzip
import zlib
from pathlib import Path

# What reading may raise.
UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a file, which may be compressed (`.gz`), without blank ones, with their numbers from 1 on."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
