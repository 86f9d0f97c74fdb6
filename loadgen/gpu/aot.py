"""`python -m loadgen.gpu.aot`: compiles FlashInfer's kernels that Ramet calls, for a machine without a compiler.

It needs FlashInfer, torch (any build of it), nvcc and a C++ compiler, and no GPU. Where `flashinfer_jit_cache` can be
imported, FlashInfer takes a kernel from there before it compiles one.
"""

import argparse
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

PACKAGE = "flashinfer_jit_cache"

_PACKAGE_CODE = '''"""Kernels of FlashInfer, compiled ahead of time for Ramet."""

from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    return str(Path(__file__).parent)
'''


class Kernel(NamedTuple):
    """A library of kernels: its name on the command line, and a function that returns FlashInfer's description."""

    name: str
    describe: Callable[[], Any]


def main() -> int:
    """Compile the missing kernels. Returns 3 if `--limit` was reached before the last kernel."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.gpu.aot", description=__doc__)
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


def package_of_kernels(out: Path) -> Path:
    """Create the package in `out` where FlashInfer, in its current version, looks for kernels."""
    from flashinfer.version import __version__

    package = out / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_PACKAGE_CODE.format(version=__version__), encoding="utf-8")
    return package


def kernels() -> Iterator[Kernel]:
    """Every library that Ramet's steps load, in the order in which a first run needs them."""
    from flashinfer.jit.activation import gen_act_and_mul_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.quantization import gen_quantization_module
    from flashinfer.jit.rope import gen_rope_module
    from flashinfer.jit.sampling import gen_sampling_module

    half, eighth = torch.bfloat16, torch.float8_e4m3fn
    yield Kernel("prefill, bfloat16, heads of 128", lambda: prefill(half, 128))
    yield Kernel("norm", gen_norm_module)
    yield Kernel("rotation", gen_rope_module)
    yield Kernel("activation", lambda: gen_act_and_mul_module("silu"))
    yield Kernel("merge", gen_cascade_module)
    yield Kernel("mask", gen_quantization_module)
    yield Kernel("decode, bfloat16, heads of 64", lambda: decode(half, 64))
    yield Kernel("prefill, bfloat16, heads of 64", lambda: prefill(half, 64))
    yield Kernel("decode, bfloat16, heads of 128", lambda: decode(half, 128))
    yield Kernel("prefill, fp8, heads of 128", lambda: prefill(eighth, 128))
    yield Kernel("decode, fp8, heads of 64", lambda: decode(eighth, 64))
    yield Kernel("prefill, fp8, heads of 64", lambda: prefill(eighth, 64))
    yield Kernel("decode, fp8, heads of 128", lambda: decode(eighth, 128))
    yield Kernel("sampling", gen_sampling_module)


def prefill(kv_dtype: torch.dtype, head_dim: int) -> Any:
    """Attention of several rows a request, and of single rows if at least 4 query heads share keys."""
    from flashinfer.jit.attention import gen_batch_prefill_module

    half = torch.bfloat16
    # No rotation (mode 0), window, cap or products in half precision within attention.
    return gen_batch_prefill_module(
        "fa2", half, kv_dtype, half, torch.int32, head_dim, head_dim, 0, False, False, False
    )


def decode(kv_dtype: torch.dtype, head_dim: int) -> Any:
    """Attention of one row a request if fewer than 4 query heads share keys."""
    from flashinfer.jit.attention import gen_batch_decode_module

    half = torch.bfloat16
    return gen_batch_decode_module(half, kv_dtype, half, torch.int32, head_dim, head_dim, 0, False, False)


def _mib(path: Path) -> float:
    return path.stat().st_size / (1 << 20)


if __name__ == "__main__":
    raise SystemExit(main())
