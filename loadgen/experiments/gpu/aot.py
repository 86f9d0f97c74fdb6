"""`python -m loadgen.experiments.gpu.aot`: compiles FlashInfer's kernels that Ramet calls.

They are for a machine without a compiler. This needs FlashInfer, torch (any build of it), nvcc and a C++ compiler, and
no GPU. Where `flashinfer_jit_cache` can be imported, FlashInfer takes a kernel from there before it compiles one.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from runtime.execution.flashinfer_kernels import Kernel, every_kernel

PACKAGE = "flashinfer_jit_cache"

_PACKAGE_CODE = '''"""Kernels of FlashInfer, compiled ahead of time for Ramet."""

from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    return str(Path(__file__).parent)
'''


def main() -> int:
    """Compile the missing kernels. Returns 3 if `--limit` was reached before the last kernel."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.experiments.gpu.aot", description=__doc__)
    parser.add_argument("out", type=Path, help="directory to put on the path of Python, beside FlashInfer")
    parser.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="kernels whose names contain this")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no kernel is begun")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    package = package_of_kernels(arguments.out)
    for kernel in kernels():
        if not any(part in kernel.name for part in arguments.only):
            continue
        spec = kernel.describe()
        target = package / spec.name / f"{spec.name}.so"
        if target.exists():
            print(f"{kernel.name}: there, {_mib(target):.1f} MiB", flush=True)
            continue
        if time.monotonic() > deadline:
            print(f"{arguments.limit:g} s are over before {kernel.name!r}: the same command goes on from there")
            return 3
        started = time.monotonic()
        spec.build()
        target.parent.mkdir(exist_ok=True)
        half = target.with_suffix(".part")
        shutil.copy(spec.jit_library_path, half)
        half.rename(target)
        print(f"{kernel.name}: {_mib(target):.1f} MiB in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def kernels() -> Iterator[Kernel]:
    """What all models load, and the prefill for Hopper alone, which `ramet bench gpu` tries: no step calls it yet."""
    yield from every_kernel()
    yield Kernel("prefill for Hopper, bfloat16, heads of 128", _hopper_prefill)


def _hopper_prefill() -> Any:
    from flashinfer.jit.attention import gen_batch_prefill_module

    half = torch.bfloat16
    return gen_batch_prefill_module("fa3", half, half, half, torch.int32, 128, 128, 0, False, False, False)


def package_of_kernels(out: Path) -> Path:
    """Create the package in `out` where FlashInfer, in its current version, looks for kernels."""
    from flashinfer.version import __version__

    package = out / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_PACKAGE_CODE.format(version=__version__), encoding="utf-8")
    return package


def _mib(path: Path) -> float:
    return path.stat().st_size / (1 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
