// What differs between Linux and macOS: memory, threads, and how an ARM processor's features are asked for.
#pragma once

#include <sys/mman.h>

#include <cstddef>

#if defined(__APPLE__)
#include <pthread.h>
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

namespace ramet {

// Zeroed memory, in huge pages if the system has them, because weights are read as one long stream. Null: no memory.
inline void* allocate(size_t bytes) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    return data;
}

#if defined(__APPLE__)

// A team is as slow as its slowest thread, so none may be put on an efficiency core.
inline void begin_thread() { pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0); }

inline bool has_feature(const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
inline bool has_dot_products() { return true; }  // all Macs with ARM have them
inline bool has_bfloat16() { return has_feature("hw.optional.arm.FEAT_BF16"); }

#else

inline void begin_thread() {}

// Bits of asm/hwcap.h for ARM.
inline bool has_dot_products() { return getauxval(AT_HWCAP) >> 20 & 1; }
inline bool has_bfloat16() { return getauxval(AT_HWCAP2) >> 14 & 1; }

#endif

}  // namespace ramet
