"""Measurements on disk, line by line, so that an interrupted profile goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import ModelError


class Records:
    """Values by key, kept in a file beside the table until that is written.

    Args:
        path: the file.
        header: model and settings; values of another header are not taken.

    Raises:
        ModelError: if the file belongs to another header.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path = path
        self._values: dict[str, Any] = {}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and json.loads(lines[0]) != json.loads(json.dumps(header)):
            raise ModelError(f"{path} was begun with another model or other settings; remove it to begin anew")
        for line in lines[1:]:
            if line.endswith("\n"):  # the last may have been cut off
                key, value = json.loads(line)
                self._values[key] = value
        whole = [line for line in lines if line.endswith("\n")] or [json.dumps(header) + "\n"]
        path.write_text("".join(whole), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def get(self, *key: object) -> Any:
        """What was measured, or None."""
        return self._values.get("/".join(map(str, key)))

    def put(self, value: Any, *key: object) -> Any:
        """Keep a measurement; returns it."""
        name = "/".join(map(str, key))
        self._values[name] = value
        self._file.write(json.dumps([name, value]) + "\n")
        self._file.flush()
        return value

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        self.path.unlink()
