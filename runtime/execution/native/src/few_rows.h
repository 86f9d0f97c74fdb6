// Attention of few rows, which reads keys and values in place. Packing a block for the micro-kernel pays off only with
// more rows.
#pragma once

#include "gemm.h"

namespace ramet {

// Keys of a block: few enough that the scores of a tile stay in the first-level cache.
constexpr int64_t kKeys = 64;

// Keys and values that a thread needs next. The thread prefetches them into the second-level cache a few at a time
// while it computes. Prefetching all at once would exceed a core's outstanding loads and stall it.
class Upcoming {
  public:
    Upcoming() = default;
    // Rows [begin, end) of a span. `k`, `v`: the part of a head in slot 0, of `bytes`; slots are `stride` bytes apart.
    Upcoming(const int32_t* pages, int64_t page_size, int64_t begin, int64_t end, const char* k, const char* v,
             int64_t stride, int64_t bytes)
        : page_(pages + begin / page_size), page_size_(page_size), row_(begin % page_size), left_(end - begin),
          k_(k), v_(v), stride_(stride), bytes_(bytes) {}

    // Always inline, for the reason given at `Ahead::fetch`.
    [[gnu::always_inline]] void fetch(int64_t rows) {
        for (rows = std::min(rows, left_), left_ -= rows; rows > 0; --rows) {
            if (row_ == page_size_) ++page_, row_ = 0;
            const int64_t offset = (*page_ * page_size_ + row_++) * stride_;
            for (int64_t b = 0; b < bytes_; b += 64) {
                __builtin_prefetch(k_ + offset + b, 0, 2);
                __builtin_prefetch(v_ + offset + b, 0, 2);
            }
        }
    }
    [[gnu::always_inline]] void fetch_rest() { fetch(left_); }

  private:
    const int32_t* page_ = nullptr;
    int64_t page_size_ = 1, row_ = 0, left_ = 0;
    const char *k_ = nullptr, *v_ = nullptr;
    int64_t stride_ = 0, bytes_ = 0;
};

// Scores [R, count rounded up to kLanes] of queries [R, dim], as `load_query` gives them, for keys at `k` + offsets.
// `dim` is a multiple of kPanel, and there are offsets up to the rounded count.
template <int R, class T>
    requires(sizeof(T) == 2 && !kPairs<T>)
void score_rows(const float* q, int64_t ldq, int64_t dim, const char* k, const int64_t* offsets, int64_t count,
                float* scores, int64_t stride, Upcoming& upcoming) {
    for (int64_t first = 0; first < count; first += kLanes) {
        Vec sums[R][kLanes / 4];
#pragma GCC unroll 4
        for (int quarter = 0; quarter < kLanes / 4; ++quarter) {
            const int64_t* at = offsets + first + 4 * quarter;
            Vec m[R][4];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) m[r][0] = m[r][1] = m[r][2] = m[r][3] = zero();
            for (int64_t d = 0; d < dim; d += kPanel) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    Vec a, b;
                    load_panel(reinterpret_cast<const T*>(k + at[i]) + d, a, b);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        m[r][i] = fma(a, load(q + r * ldq + d), m[r][i]);
                        m[r][i] = fma(b, load(q + r * ldq + d + kLanes), m[r][i]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[r][quarter] = sum4(m[r][0], m[r][1], m[r][2], m[r][3]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) store(scores + r * stride + first, sum_quarters(sums[r]));
        upcoming.fetch(kLanes / 2);
    }
}

// The same for float32 and for pairs, summed in the order of `dot_f32` and of `dot_pairs`, so that a row gets the same
// bits alone and with other rows.
template <int R, class T>
    requires(sizeof(T) == 4 || kPairs<T>)
void score_rows(const float* q, int64_t ldq, int64_t dim, const char* k, const int64_t* offsets, int64_t count,
                float* scores, int64_t stride, Upcoming& upcoming) {
    for (int64_t first = 0; first < count; first += kLanes) {
        Vec sums[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r] = zero();
        for (int64_t lane = 0; lane < dim * int64_t(sizeof(T)) / 4; lane += kLanes) {
            Vec m[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) m[i] = load(reinterpret_cast<const float*>(k + offsets[first + i]) + lane);
            transpose(m);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const Vec x = set1(q[r * ldq + lane + i]);
                    if constexpr (kPairs<T>) {
                        sums[r] = fma_pairs(as_bits(x), as_bits(m[i]), sums[r]);
                    } else {
                        sums[r] = fma(x, m[i], sums[r]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) store(scores + r * stride + first, sums[r]);
        upcoming.fetch(kLanes / 2);
    }
}

// tile += weights [R, count] * values at `v` + offsets, for kPanel dimensions. The weights come from `weigh`; of pairs
// with an odd count, the weight after the last is 0.
template <int R, class T>
[[gnu::always_inline]] inline void dot_values(Tile<R>& tile, const float* weights, int64_t stride, const char* v,
                                              const int64_t* offsets, int64_t count) {
    for (int64_t i = 0; i < count; i += kPairs<T> ? 2 : 1) {
        if constexpr (kPairs<T>) {
            Bits a, b;
            load_pairs(v + offsets[i], v + offsets[i + 1], a, b);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                Bits weight = as_bits(set1(weights[r * stride + i / 2]));
                tile[r][0] = fma_pairs(weight, a, tile[r][0]);
                tile[r][1] = fma_pairs(weight, b, tile[r][1]);
            }
        } else {
            Vec a, b;
            load_panel(reinterpret_cast<const T*>(v + offsets[i]), a, b);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                Vec weight = set1(weights[r * stride + i]);
                tile[r][0] = fma(weight, a, tile[r][0]);
                tile[r][1] = fma(weight, b, tile[r][1]);
            }
        }
    }
}

// out [R, dim] = out * decay + weights [R, count] * values at `v` + offsets; without pairs in the order of `split<T>`.
template <int R, class T>
void add_values(const float* weights, int64_t stride, const char* v, const int64_t* offsets, int64_t count,
                const float* decay, float* out, int64_t ldo, int64_t dim, Upcoming& upcoming) {
    static constexpr float kOnes[4] = {1, 1, 1, 1};
    for (int64_t d = 0; d < dim; d += kPanel, v += kPanel * sizeof(T)) {
        for (int64_t first = 0; first < count; first += kKeys) {
            Tile<R> tile;
            clear<R>(tile);
            for (int64_t i = first; i < std::min(first + kKeys, count); i += kLanes) {
                const float* from = weights + (kPairs<T> ? i / 2 : i);
                dot_values<R, T>(tile, from, stride, v, offsets + i, std::min<int64_t>(kLanes, count - i));
                if (d == 0) upcoming.fetch(kLanes / 2);
            }
            add_scaled<R>(out + d, ldo, first == 0 ? decay : kOnes, tile);
        }
    }
}

}  // namespace ramet
