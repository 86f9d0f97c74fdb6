// What all x86 processors share.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "bf16.h"

namespace ramet {

inline __m128i float4_table() { return _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4); }

template <class Bits>
[[gnu::always_inline]] inline void pin(Bits& b) {
    asm("" : "+v"(b));
}

inline uint64_t ticks() { return __rdtsc(); }
constexpr uint64_t spin_ticks() { return 100'000; }  // of the time stamp counter: 30 to 50 microseconds
inline void pause() { _mm_pause(); }

}  // namespace ramet
