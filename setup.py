"""Builds the native CPU kernels; pyproject.toml has everything else.

The same sources are compiled for each instruction set of the processors that the wheel is for. The engine loads the
best library that the processor supports (runtime/execution/native/library.py). All libraries are optional: without a
compiler, or on other processors, torch computes.
"""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("runtime/execution/native/src")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
VNNI = [*AVX512, "-mavx512vnni"]
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512vnni": VNNI,
    "avx512bf16": [*VNNI, "-mavx512bf16"],
}
# Before it has given out registers, GCC would move loads so far ahead of their use that accumulators leave theirs.
UNMOVED = "-fno-schedule-insns"
ARM = {
    "neon": ["-march=armv8.2-a+dotprod", UNMOVED],
    "neonbf16": ["-march=armv8.2-a+dotprod+bf16", UNMOVED],
}
# No warnings about uninitialized values, because GCC's own intrinsics read them.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]

# Such as linux-x86_64 or macosx-11.0-arm64; `_PYTHON_HOST_PLATFORM` sets it for another processor (CONTRIBUTING.md).
platform = sysconfig.get_platform()
is_macos, is_arm = platform.startswith("macosx"), platform.endswith(("-aarch64", "-arm64"))
# Python's own installer for macOS is built for both processors and for macOS 10.9 or 10.13; it would compile for these.
# The first macOS on ARM is 11; threads that wait for a number (std::atomic::wait) are not in the libraries before it.
architecture = ["-arch", "arm64", "-mmacosx-version-min=11.0"] if is_macos else []

setup(
    ext_modules=[
        Extension(
            f"runtime.execution.native._{isa}",
            [str(SOURCES / f"{isa}.cpp")],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            language="c++",
            extra_compile_args=[*architecture, *FLAGS, *flags],
            extra_link_args=[*architecture, "-pthread"],
            optional=True,
        )
        for isa, flags in (ARM if is_arm or is_macos else X86).items()
    ]
)
