"""The models on this machine, and which of them fit into its memory."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from runtime.config import DEFAULT_MODEL, Config

_GIB = 1 << 30
# Memory of the process beside weights and pool.
_REST = 0.7 * _GIB


def found_models() -> Iterator[tuple[str, int]]:
    """Names for `--model`, and bytes of weights: the hub's cache, and GGUF files and models in this directory."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for path in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        if size := max(map(_size, _within(path / "snapshots")), default=0):
            yield path.name.removeprefix("models--").replace("--", "/"), size
    for path in _within(Path()):
        has_config = any(one.name == "config.json" for one in _within(path))
        if size := _bytes(path) if path.suffix == ".gguf" else _size(path) if has_config else 0:
            yield f"./{path.name}", size


def _within(directory: Path) -> list[Path]:
    """What a directory has, sorted, hidden files left out; nothing for another user's, and for what is no directory."""
    with suppress(OSError):
        return sorted(directory.glob("[!.]*"))
    return []


def _size(directory: Path) -> int:
    return sum(_bytes(path) for path in _within(directory) if path.suffix == ".safetensors")


def _bytes(path: Path) -> int:
    """A file's size; 0 for a link to nothing, and for what may not be read."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def free_memory() -> int:
    """Available bytes, page cache included."""
    with suppress(OSError):
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    with suppress(OSError):  # macOS
        told = subprocess.run(["vm_stat"], capture_output=True, text=True, check=False).stdout
        pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable): +(\d+)", told, re.MULTILINE)
        if size := re.search(r"page size of (\d+) bytes", told):
            return int(size[1]) * sum(map(int, pages))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def advice(config: Config) -> str:
    """For a start without `--model`: the models that were found, and how large one may be."""
    room = free_memory() - (config.cache.pool_memory or 1) * _GIB - _REST
    told = [
        f"{name} ({size / _GIB:.1f} GiB{'' if size <= room else ', which is too large for this memory'})"
        for name, size in found_models()
    ]
    others = f"; also here: {', '.join(told)}" if told else ""
    fits = f"weights of up to {max(room, 0) / _GIB:.1f} GiB fit this machine's free memory"
    return f"no --model: serving {DEFAULT_MODEL}{others}; --model takes a directory, a GGUF file or org/name; {fits}"
