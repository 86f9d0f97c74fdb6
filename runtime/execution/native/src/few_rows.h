// Attention of few rows: keys and values are read in place. Bringing a block into the micro-kernel's form pays only
// for more rows.
#pragma once

#include "gemm.h"

namespace ramet {

// Keys and values that a thread needs next. It prefetches them into the second-level cache bit by bit while it
// computes: all at once they would exceed a core's outstanding loads and stall it.
class Upcoming {
  public:
    Upcoming() = default;
    // Rows [begin, end) of a span; `k` and `v` point to the head's part of slot 0, `stride` and `bytes` are of a row.
    Upcoming(const int32_t* pages, int64_t page_size, int64_t begin, int64_t end, const char* k, const char* v,
             int64_t stride, int64_t bytes)
        : page_(pages + begin / page_size), page_size_(page_size), row_(begin % page_size), left_(end - begin),
          k_(k), v_(v), stride_(stride), bytes_(bytes) {}

    // Always inline, as `prefetch_ahead`.
    [[gnu::always_inline]] void fetch(int64_t rows) {
        for (rows = std::min(rows, left_), left_ -= rows; rows > 0; --rows) {
            if (row_ == page_size_) ++page_, row_ = 0;
            const int64_t offset = (*page_ * page_size_ + row_++) * stride_;
            for (int64_t b = 0; b < bytes_; b += 64) {
                _mm_prefetch(k_ + offset + b, _MM_HINT_T1);
                _mm_prefetch(v_ + offset + b, _MM_HINT_T1);
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
                    const T* key = reinterpret_cast<const T*>(k + at[i]) + d;
                    Vec a, b;
                    if constexpr (!kPairs<T>) load_panel(key, a, b);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        if constexpr (kPairs<T>) {
                            m[r][i] = fma_pairs(load_bits(key), load_bits(q + r * ldq + d / 2), m[r][i]);
                        } else {
                            m[r][i] = fma(a, load(q + r * ldq + d), m[r][i]);
                            m[r][i] = fma(b, load(q + r * ldq + d + kLanes), m[r][i]);
                        }
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

// out [R, dim], `split<T>`, becomes out * decay + weights [R, count] * the values at `v` + offsets.
template <int R, class T>
    requires(!kPairs<T>)
void add_values(const float* weights, int64_t stride, const char* v, const int64_t* offsets, int64_t count,
                const float* decay, float* out, int64_t ldo, int64_t dim, Upcoming& upcoming) {
    for (int64_t d = 0; d < dim; d += kPanel) {
        Tile<R> tile;
        load_scaled<R>(tile, out + d, ldo, decay);
        for (int64_t i = 0; i < count; ++i) {
            Vec a, b;
            load_panel(reinterpret_cast<const T*>(v + offsets[i]) + d, a, b);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                Vec weight = set1(weights[r * stride + i]);
                tile[r][0] = fma(weight, a, tile[r][0]);
                tile[r][1] = fma(weight, b, tile[r][1]);
            }
            if (d == 0 && i % kLanes == 0) upcoming.fetch(kLanes / 2);
        }
        store<R>(out + d, ldo, tile);
    }
}

// The same by pairs of keys, with weights as `weigh` gives them, and `out` in order. A weight behind the last is 0.
template <int R, class T>
    requires(kPairs<T>)
void add_values(const float* weights, int64_t stride, const char* v, const int64_t* offsets, int64_t count,
                const float* decay, float* out, int64_t ldo, int64_t dim, Upcoming& upcoming) {
    for (int64_t d = 0; d < dim; d += kPanel) {
        Tile<R> tile;
        load_scaled<R>(tile, out + d, ldo, decay);
        for (int64_t i = 0; i < count; i += 2) {
            Bits a, b;
            load_pairs(v + offsets[i] + 2 * d, v + offsets[i + 1] + 2 * d, a, b);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                Bits weight = std::bit_cast<Bits>(set1(weights[r * stride + i / 2]));
                tile[r][0] = fma_pairs(weight, a, tile[r][0]);
                tile[r][1] = fma_pairs(weight, b, tile[r][1]);
            }
            if (d == 0 && i % kLanes == 0) upcoming.fetch(kLanes / 2);
        }
        store<R>(out + d, ldo, tile);
    }
}

}  // namespace ramet
