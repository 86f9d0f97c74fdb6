#!/bin/bash
# Counts instructions of the kernels, which QEMU tells for both architectures: Debian's qemu-user and g++-aarch64-linux-gnu.
set -euo pipefail
python=$1 out=build/arm/count
mkdir -p $out
cc -O2 -shared -fPIC -o $out/instructions.so tests/arm/instructions.c
for isa in avx2 neon neonbf16; do
    if [ $isa = avx2 ]; then compiler=g++ qemu=qemu-x86_64; else compiler=aarch64-linux-gnu-g++ qemu=qemu-aarch64; fi
    flags=$("$python" -c "import runpy, setuptools; setuptools.setup = lambda **_: None
found = runpy.run_path('setup.py'); print(*found['FLAGS'], *{**found['X86'], **found['ARM']}['$isa'])")
    $compiler $flags -include runtime/execution/native/src/$isa.cpp -o $out/$isa tests/arm/count.cpp
    echo "$isa"
    $qemu -cpu max -L /usr/aarch64-linux-gnu -plugin $out/instructions.so,to=$out/$isa.counter $out/$isa $out/$isa.counter
done
