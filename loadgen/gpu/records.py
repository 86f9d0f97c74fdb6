"""What was measured, kept from item to item, so that a run that was ended goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Item = tuple[str, Callable[[], Figures]]


class Records:
    """Figures by item in one JSON file, and a table of them beside it.

    Args:
        path: of the JSON file; the table has the suffix `.md`.
        about: machine, versions and command.
    """

    def __init__(self, path: Path, about: Figures):
        self.path = path
        self.figures: dict[str, Figures] = {}
        if path.exists():
            self.figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        self.about = about

    def measure(self, items: Iterable[Item], limit_s: float) -> bool:
        """Run what has no figures yet; False if the time was up before the last."""
        deadline = time.monotonic() + limit_s
        for name, run in items:
            if name in self.figures:
                continue
            if time.monotonic() > deadline:
                print(f"{limit_s:g} s are over before {name!r}: the same command goes on from there")
                return False
            started = time.monotonic()
            self.figures[name] = run()
            self._write()
            shown = ", ".join(f"{key} {_shown(value)}" for key, value in self.figures[name].items())
            print(f"{name} ({time.monotonic() - started:.1f} s): {shown}", flush=True)
        return True

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"about": self.about, "figures": self.figures}, indent=1) + "\n")
        self.path.with_suffix(".md").write_text(markdown(self.about, self.figures))


def markdown(about: Figures, figures: dict[str, Figures]) -> str:
    """One table for items of the same figures, in the order in which they were measured."""
    lines = [f"- {key}: {value}" for key, value in about.items()]
    columns: list[str] = []
    for name, row in figures.items():
        if list(row) != columns:
            columns = list(row)
            lines += ["", f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        lines.append(f"| {name} | {' | '.join(_shown(value) for value in row.values())} |")
    return "\n".join(lines) + "\n"


def describe_machine(device: str) -> Figures:
    """Date, machine, driver, versions and command."""
    import torch

    now = datetime.now(UTC).isoformat(timespec="minutes")
    found: Figures = {"date": now, "command": "ramet " + " ".join(sys.argv[1:])}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        found["CUDA"] = torch.version.cuda
    else:
        found["device"] = "CPU, to try the benchmark: these figures say nothing"
    for package in ("torch", "triton", "flashinfer-python", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
