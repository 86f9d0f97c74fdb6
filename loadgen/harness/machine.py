"""Describes the machine on which a bench runs."""

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_PACKAGES = ("ramet", "torch", "transformers", "flashinfer-python")
_SHOWN = ("python", "torch", "flashinfer-python")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, its vector instructions, GPU, and versions of packages."""
    cpu = _cpu_info()
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [name for name in _FLAGS if name in flags],
        "gpu": _gpu(),
        "system": platform.system(),
        "versions": versions,
    }


def machine_text(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    parts = [f"{facts['cores']} cores of {facts['cpu']}"]
    if facts["gpu"]:
        parts.append(facts["gpu"])
    if facts["flags"]:
        parts.append(" ".join(facts["flags"]))
    parts += [f"{name} {number}" for name, number in facts["versions"].items() if name in _SHOWN]
    return ", ".join(parts)


def _cpu_info() -> dict[str, str]:
    """The lines of the first processor in /proc/cpuinfo; empty on other systems."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _gpu() -> str | None:
    """The first NVIDIA GPU and its driver's version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError):
        found = subprocess.run(query, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return ", driver ".join(found.stdout.splitlines()[0].split(", "))
    return None


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants. Raises OSError if there is no such process, or no /proc."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(path.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    if pid not in ticks:
        raise ProcessLookupError(f"there is no process {pid}")
    found, ours = {pid}, 0
    while len(found) > ours:
        ours = len(found)
        found |= {number for number, parent in parents.items() if parent in found}
    return sum(ticks[number] for number in found) / os.sysconf("SC_CLK_TCK")
