#!/bin/bash
# Reads the sources of the kernels as clang does for macOS: Debian's clang and g++-aarch64-linux-gnu, no SDK.
#
# The libraries' headers are Linux's, so the first two runs take system.h for Linux, but types, calls and NEON for macOS.
# The last one reads macOS's half of system.h, with declarations of what it calls.
set -euo pipefail
out=build/arm/macos sources=runtime/execution/native/src headers=/usr/aarch64-linux-gnu/include
clang=(clang++ -target arm64-apple-macos11 -std=c++20 -fsyntax-only -Wall -Wextra -Werror -nostdinc++)
linux=(-U__APPLE__ -U__nonnull -D__linux__ -D__ELF__ -D_GNU_SOURCE
       -isystem $headers/c++/12 -isystem $headers/c++/12/aarch64-linux-gnu -isystem $headers)
"${clang[@]}" "${linux[@]}" -march=armv8.2-a+dotprod $sources/neon.cpp
"${clang[@]}" "${linux[@]}" -march=armv8.2-a+dotprod+bf16 $sources/neonbf16.cpp
mkdir -p $out/sys
echo 'namespace std { using size_t = __SIZE_TYPE__; } using std::size_t;' > $out/cstddef
echo 'enum qos_class_t { QOS_CLASS_USER_INITIATED }; extern "C" int pthread_set_qos_class_self_np(qos_class_t, int);' > $out/pthread.h
echo 'extern "C" int sysctlbyname(const char*, void*, __SIZE_TYPE__*, void*, __SIZE_TYPE__);' > $out/sys/sysctl.h
cat > $out/sys/mman.h << 'END'
enum { PROT_READ = 1, PROT_WRITE = 2, MAP_PRIVATE = 2, MAP_ANONYMOUS = 0x1000 };
#define MAP_FAILED ((void*)-1)
extern "C" void* mmap(void*, __SIZE_TYPE__, int, int, int, long long);
END
"${clang[@]}" -isystem $out -x c++ -include $sources/system.h /dev/null
echo "clang reads the kernels for macOS"
