#!/bin/bash
# Tries a wheel for ARM in emulation: run.sh PYTHON WHEEL [argument of pytest ...]. PYTHON is 3.11, as Debian's is, and has
# Ramet's dependencies. $GGUF may name a GGUF file, which a server is then asked of as well.
#
# build/arm gets Debian's files for arm64, the wheels for ARM from PyPI, the wheel, the tests and the default model. None
# of them runs where they are put there. Programs run in namespaces of their own, in which the kernel gives QEMU all
# programs for ARM: Linux 6.7 or later, as root. The requests run on a processor that has what `neon` needs and no more, the
# tests on one that has all that QEMU knows, so that they try `neonbf16` as well.
set -euo pipefail
python=$1 wheel=$2
shift 2
export GGUF=${GGUF:-} gguf=${GGUF:+tmp/${GGUF##*/}}
root=build/arm/root site=build/arm/root/opt/site
# The last version whose wheel for ARM needs no CUDA.
torch=torch==2.10.0
[[ $wheel == *-cp311-* ]] || { echo "ERROR: $wheel is not for Python 3.11, as Debian's is: make clean, then PYTHON=python3.11" >&2; exit 1; }

if [ ! -d $root ]; then
    mkdir -p build/arm
    rm -rf $root.new
    mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3.11,libgomp1,libstdc++6,bash,coreutils \
        bookworm $root.new
    platforms=(--platform any --platform manylinux2014_aarch64)
    for glibc in {36..17}; do platforms+=(--platform manylinux_2_${glibc}_aarch64); done
    fetch=("$python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --python-version 3.11
           --implementation cp --abi cp311 --abi abi3 --abi none "${platforms[@]}" --target $root.new/opt/site)
    "${fetch[@]}" --no-deps $torch
    "$python" docker/requirements.py | grep -v ^torch > build/arm/requirements.txt
    "${fetch[@]}" --requirement build/arm/requirements.txt filelock sympy networkx fsspec setuptools packaging httpx \
        pytest pytest-timeout pytest-xdist hypothesis
    echo root:x:0:0:root:/root:/bin/bash > $root.new/etc/passwd
    mv $root.new $root
fi
rm -rf $site/{radix,runtime,server,loadgen} $root/opt/ramet
"$python" -m zipfile -e "$wheel" $site
mkdir -p $root/opt/ramet $root/root/.cache/ramet/models
cp -r tests pyproject.toml $root/opt/ramet
model=$("$python" -m server.cli fetch-model)
cp -ru "$model" $root/root/.cache/ramet/models

inside() {
    QEMU_CPU=${QEMU_CPU:-cortex-a76} unshare --user --map-root-user --mount --pid --fork --kill-child bash -ec '
        root=$1
        shift
        mount -t binfmt_misc none /proc/sys/fs/binfmt_misc || { echo "ERROR: Linux 6.7 or later, and root" >&2; exit 1; }
        printf "%s" ":arm:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff" \
            "\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:$(command -v qemu-aarch64-static):F" \
            > /proc/sys/fs/binfmt_misc/register
        mkdir -p "$root"/{dev,proc,sys,tmp}
        for name in dev sys; do mount --rbind /$name "$root/$name"; done
        mount -t proc none "$root/proc"
        mount -t tmpfs none "$root/tmp"
        if [ -n "$GGUF" ]; then touch "$root/$gguf" && mount --bind "$GGUF" "$root/$gguf"; fi
        exec chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/bin:/bin OMP_NUM_THREADS=1 QEMU_CPU="$QEMU_CPU" \
            PYTHONPATH=/opt/site:/opt/ramet /bin/bash -ec "cd /opt/ramet && exec \"\$@\"" - "$@"
    ' - $root "$@"
}
inside python3.11 -P tests/arm/ask.py ${gguf:+"/$gguf"}
QEMU_CPU=max inside python3.11 -P -m pytest -p no:cacheprovider -q --hypothesis-profile=repeat --timeout=3000 "$@"
