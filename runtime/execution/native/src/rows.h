// Rows of 32-bit lanes, as micro-kernels read them, and prefetching of weights.
#pragma once

#include "vec.h"

namespace ramet {

// An iterator along up to kMaxRows rows of 32-bit lanes. It has one base pointer for each three rows, which it reaches
// by 0, 1 or 2 strides, so that the general registers suffice.
template <int R>
struct Rows {
    static constexpr int kBases = (R + 2) / 3;
    const char* base[kBases];
    int64_t stride;  // bytes

    Rows(const void* data, int64_t stride_lanes) : stride(stride_lanes * 4) {
#pragma GCC unroll 8
        for (int i = 0; i < kBases; ++i) base[i] = static_cast<const char*>(data) + 3 * i * stride;
    }
    // The value `i` lanes ahead in row r, broadcast to a vector.
    [[gnu::always_inline]] Vec at(int r, int i = 0) const {
        return set1(*(reinterpret_cast<const float*>(base[r / 3] + (r % 3) * stride) + i));
    }
    [[gnu::always_inline]] void advance(int lanes) {
#pragma GCC unroll 8
        for (int i = 0; i < kBases; ++i) {
            base[i] += lanes * 4;
            // Without this, the compiler would keep a pointer for every row, and run out of registers.
            asm("" : "+r"(base[i]));
        }
    }
};

// The accumulators of a micro-kernel. Loops over them have unroll pragmas, so that they stay in registers.
template <int R>
using Tile = Vec[R][2];

template <int R>
[[gnu::always_inline]] inline void clear(Tile<R>& tile) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) tile[r][0] = tile[r][1] = zero();
}

template <int R>
[[gnu::always_inline]] inline void store(float* rows, int64_t stride, const Tile<R>& tile) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        store(rows + r * stride, tile[r][0]);
        store(rows + r * stride + kLanes, tile[r][1]);
    }
}

template <int R>
[[gnu::always_inline]] inline void load(Tile<R>& tile, const float* rows, int64_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        tile[r][0] = load(rows + r * stride);
        tile[r][1] = load(rows + r * stride + kLanes);
    }
}

// Weights to prefetch: `step` bytes for each kPanel lanes of the current weights.
struct Ahead {
    static constexpr int64_t kLine = 64;
    const char* at = nullptr;
    int64_t step = 0;

    // Always inline, because GCC drops calls to a function that only prefetches.
    [[gnu::always_inline]] void fetch() {
        for (int64_t b = 0; b < step; b += kLine) __builtin_prefetch(at + b, 0, 2);
        at += step;
    }
};

}  // namespace ramet
