"""Results as JSON and CSV files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec

from loadgen.http.record import Record

_DERIVED = ("ttft_s", "tpot_s", "e2e_s")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file atomically, so that a second Ctrl-C leaves the one before."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    draft.replace(path)


def write_csv(path: Path, records: list[Record]) -> None:
    """Write a line for each request, with its latencies and without the times of its pieces."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [
            {k: v for k, v in record.as_dict().items() if k != "arrivals_s"}
            | {name: getattr(record, name) for name in _DERIVED}
            for record in records
        ]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def read_run(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """A run that `write_json` wrote: all of it, and its counted records. Raises ValueError for any other file."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != "ramet-bench-1":
            raise ValueError(f"its format is {data['format']!r}")
        records = msgspec.convert(data["requests"], list[Record])
        cut_s = float(data["cut_s"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not the result of a run: {error}") from None
    return data, [record for record in records if record.scheduled_s >= cut_s]
