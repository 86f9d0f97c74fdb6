"""Figures of the GPU benchmark: measured item by item, recorded, and shown as tables."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from loadgen.harness.report import markdown_table
from loadgen.micro.records import Records

Figures = dict[str, Any]
Item = tuple[str, Callable[[], Figures]]


def measure(path: Path, items: Iterable[Item], limit_s: float, machine: Figures) -> bool:
    """Measure the items that have no figures yet; False if the time was up before the last.

    Args:
        path: JSONL file of the figures, by the item's name; a table is written beside it, with the suffix `.md`.
        items: name and measurement.
        limit_s: seconds after which no measurement begins.
        machine: see `describe_machine`; figures of another machine are refused.

    Raises:
        ModelError: if the file was begun on another machine or with other versions.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    records = Records(path, machine)
    about = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "command": "ramet " + " ".join(sys.argv[1:])}
    deadline, figures = time.monotonic() + limit_s, {}
    for name, run in items:
        if (found := records.get(name)) is None:
            if time.monotonic() > deadline:
                print(f"{limit_s:g} s are over before {name!r}: the same command goes on from there")
                return False
            started = time.monotonic()
            found = run()
            records.put(name, found)
            line = ", ".join(f"{key} {shown(value)}" for key, value in found.items())
            print(f"{name} ({time.monotonic() - started:.1f} s): {line}", flush=True)
        figures[name] = found
        path.with_suffix(".md").write_text(markdown({**about, **machine}, figures))
    return True


def markdown(about: Figures, figures: dict[str, Figures]) -> str:
    """Tables of the items, in their order; a new one begins where the figures have other names."""
    parts = ["".join(f"- {key}: {value}\n" for key, value in about.items())]
    for columns, rows in groupby(figures.items(), lambda item: list(item[1])):
        parts.append(markdown_table(["", *columns], ([name, *map(shown, row.values())] for name, row in rows)))
    return "\n".join(parts)


def describe_machine(device: str) -> Figures:
    """Device, driver and versions."""
    found: Figures = {}
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


def shown(value: Any) -> str:
    """A figure in a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
