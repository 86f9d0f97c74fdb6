#!/bin/bash
# Reads the sources of the kernels as clang does for macOS: Debian's clang, libc++-dev and g++-aarch64-linux-gnu, no SDK.
# macos.sh PYTHON, which has setuptools. The flags are those of `setup.py`.
#
# libc++ is macOS's C++ library, and says which macOS has what. The headers of C are Linux's, so the first runs take
# system.h for Linux, but types, calls and NEON for macOS. The last one reads macOS's half of system.h, with declarations
# of what it calls.
set -euo pipefail
python=$1
out=build/arm/macos sources=runtime/execution/native/src
libcxx=$(find /usr/lib/llvm-*/include/c++/v1 -maxdepth 0 | tail -n 1)
[ -n "$libcxx" ] || { echo "ERROR: libc++ is missing; on Debian: apt-get install libc++-dev" >&2; exit 1; }
mkdir -p $out/sys
# As Python from python.org asks for it.
export MACOSX_DEPLOYMENT_TARGET=10.9
clang=(clang++ -target x86_64-apple-darwin -fsyntax-only -Wall -Wextra -Werror -Wno-unknown-warning-option
       -Wno-ignored-optimization-argument -nostdinc++)
cat > $out/availability.h << 'END'
#include <__config_site>
#undef _LIBCPP_HAS_NO_VENDOR_AVAILABILITY_ANNOTATIONS
#define __APPLE__ 1
#include <__availability>
#undef __APPLE__
END
linux=(-U__APPLE__ -U__nonnull -D__linux__ -D__ELF__ -D_GNU_SOURCE -isystem "$libcxx"
       -isystem /usr/aarch64-linux-gnu/include -include $out/availability.h)
for isa in neon neonbf16; do
    flags=$(_PYTHON_HOST_PLATFORM=macosx-10.9-universal2 "$python" -c "import runpy, setuptools
setuptools.setup = lambda ext_modules: [print(*each.extra_compile_args) for each in ext_modules if each.name.endswith('_$isa')]
runpy.run_path('setup.py')")
    # shellcheck disable=SC2086 # words
    "${clang[@]}" $flags "${linux[@]}" $sources/$isa.cpp
done
echo 'namespace std { using size_t = __SIZE_TYPE__; } using std::size_t;' > $out/cstddef
echo 'enum qos_class_t { QOS_CLASS_USER_INITIATED }; extern "C" int pthread_set_qos_class_self_np(qos_class_t, int);' > $out/pthread.h
echo 'extern "C" int sysctlbyname(const char*, void*, __SIZE_TYPE__*, void*, __SIZE_TYPE__);' > $out/sys/sysctl.h
cat > $out/sys/mman.h << 'END'
enum { PROT_READ = 1, PROT_WRITE = 2, MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x1000 };
#define MAP_FAILED ((void*)-1)
extern "C" void* mmap(void*, __SIZE_TYPE__, int, int, int, long long);
END
# shellcheck disable=SC2086
"${clang[@]}" $flags -isystem $out -x c++ -include $sources/system.h /dev/null
echo "clang reads the kernels for macOS"
