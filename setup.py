"""Builds the native CPU kernels; pyproject.toml has everything else.

The same sources are compiled for each instruction set. The engine loads the best library that the processor supports
(runtime/execution/native/library.py). All libraries are optional: without a compiler, or on processors other than
x86-64, torch computes.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("runtime/execution/native/src")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
VNNI = [*AVX512, "-mavx512vnni"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512vnni": VNNI,
    "avx512bf16": [*VNNI, "-mavx512bf16"],
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
