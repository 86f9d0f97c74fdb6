"""A resumable store of measurements: an interrupted run continues where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import ModelError


class Records:
    """Outcomes by key in a JSONL file, written at once. Keys and outcomes are JSON; the last `put` of a key counts.

    Args:
        path: the file.
        header: settings on which all outcomes depend; None: every key holds its own.

    Raises:
        ModelError: if the file was begun with another header.
    """

    def __init__(self, path: Path, header: dict[str, Any] | None = None):
        self.path = path
        self._outcomes: dict[str, Any] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the run was interrupted while it wrote
            path.write_text(whole, encoding="utf-8")
        lines = [json.loads(line) for line in whole.splitlines()]
        if header is not None:
            begun = [line["header"] for line in lines[:1] if "header" in line]
            if lines and begun != [json.loads(json.dumps(header))]:
                raise ModelError(f"{path} was begun with another model or with other settings; remove it to begin anew")
            if not lines:
                self._write({"header": header})
        for line in lines:
            if "of" in line:
                self._outcomes[_name(line["of"])] = line["outcome"]

    def get(self, key: Any) -> Any:
        """The outcome of a key, None where there is none."""
        return self._outcomes.get(_name(key))

    def put(self, key: Any, outcome: Any) -> None:
        self._outcomes[_name(key)] = outcome
        self._write({"of": key, "outcome": outcome})

    def remove(self) -> None:
        self.path.unlink()

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _name(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
