"""The build of the native CPU kernels; pyproject.toml has everything else.

The same sources are compiled for each instruction set, and the engine loads the best one that the processor has
(runtime/execution/native/library.py). All are optional: without a compiler, or on another kind of processor, torch
computes.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("runtime/execution/native/src")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
VNNI = [*AVX512, "-mavx512vnni"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": AVX512,
    "avx512vnni": VNNI,
    "avx512bf16": [*VNNI, "-mavx512bf16"],
}
# GCC's own intrinsics read what they call undefined.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]

setup(
    ext_modules=[
        Extension(
            f"runtime.execution.native._{isa}",
            [str(SOURCES / f"{isa}.cpp")],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            language="c++",
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for isa, flags in ISA_FLAGS.items()
    ]
)
