// Activations times packed weights, with the same micro-kernel for any number of rows.
#pragma once

#include <array>
#include <utility>

#include "buffer.h"
#include "matrix.h"

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

// rows [R, kPanel] = rows * factors [R] + tile.
template <int R>
[[gnu::always_inline]] inline void add_scaled(float* rows, int64_t stride, const float* factors, const Tile<R>& tile) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        float* row = rows + r * stride;
        store(row, fma(load(row), set1(factors[r]), tile[r][0]));
        store(row + kLanes, fma(load(row + kLanes), set1(factors[r]), tile[r][1]));
    }
}

template <int R>
[[gnu::always_inline]] inline void store(float* rows, int64_t stride, const Tile<R>& tile) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        store(rows + r * stride, tile[r][0]);
        store(rows + r * stride + kLanes, tile[r][1]);
    }
}

// Weights to prefetch: `step` bytes for each kPanel lanes of the current weights.
struct Ahead {
    static constexpr int64_t kLine = 64;
    const char* at = nullptr;
    int64_t step = 0;

    // Always inline, because GCC drops calls to a function that only prefetches.
    [[gnu::always_inline]] void fetch() {
        _mm_prefetch(at, _MM_HINT_T1);
        if (step > kLine) _mm_prefetch(at + kLine, _MM_HINT_T1);
        at += step;
    }
};

// Prefetch 8 KiB ahead in the current stream of weights.
inline Ahead stream(const uint32_t* w) { return {reinterpret_cast<const char*>(w) + (8 << 10), kPanel * 4}; }

// tile += a [R, count] * float32 panel [count, kPanel]. `Fetches`: whether to prefetch `ahead`.
template <int R, bool Fetches>
[[gnu::always_inline]] inline void dot_f32(Tile<R>& tile, const void* a, int64_t lda, const uint32_t* w, int64_t count,
                                           Ahead ahead = {}) {
    Rows<R> rows(a, lda);
    const float* weights = reinterpret_cast<const float*>(w);
    for (int64_t i = 0; i < count; ++i, weights += kPanel) {
        Vec w0 = load(weights), w1 = load(weights + kLanes);
        if constexpr (Fetches) ahead.fetch();
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Vec x = rows.at(r);
            tile[r][0] = fma(x, w0, tile[r][0]);
            tile[r][1] = fma(x, w1, tile[r][1]);
        }
        rows.advance(1);
    }
}

// tile += a [R, 2 * count] * bfloat16 panel of `count` pairs, in float32 and exactly as if the weights were float32.
template <int R>
[[gnu::always_inline]] inline void dot_bf16(Tile<R>& tile, const void* a, int64_t lda, const uint32_t* w, int64_t count,
                                            Ahead ahead) {
    Rows<R> rows(a, lda);
    // With few rows, separate sums for even and odd k hide the latency of additions.
    constexpr bool kTwice = R <= kMaxRows / 3;
    Tile<kTwice ? R : 1> odd;
    clear<kTwice ? R : 1>(odd);
    for (int64_t i = 0; i < count; ++i, w += kPanel) {
        ahead.fetch();
        Bits b0 = load_bits(w), b1 = load_bits(w + kLanes);
        Vec w0 = low_bf16(b0), w1 = low_bf16(b1);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Vec x = rows.at(r);
            tile[r][0] = fma(x, w0, tile[r][0]);
            tile[r][1] = fma(x, w1, tile[r][1]);
        }
        w0 = high_bf16(b0), w1 = high_bf16(b1);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Vec x = rows.at(r, 1);
            auto& sums = kTwice ? odd[kTwice ? r : 0] : tile[r];
            sums[0] = fma(x, w0, sums[0]);
            sums[1] = fma(x, w1, sums[1]);
        }
        rows.advance(2);
    }
    if constexpr (kTwice) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            tile[r][0] = add(tile[r][0], odd[r][0]);
            tile[r][1] = add(tile[r][1], odd[r][1]);
        }
    }
}

// The same with activations rounded to bfloat16 pairs [R, count], products and sums in float32.
template <int R, bool Fetches>
[[gnu::always_inline]] inline void dot_pairs(Tile<R>& tile, const void* a, int64_t lda, const uint32_t* w,
                                             int64_t count, Ahead ahead = {}) {
    Rows<R> rows(a, lda);
    for (int64_t i = 0; i < count; ++i, w += kPanel) {
        Bits w0 = load_bits(w), w1 = load_bits(w + kLanes);
        if constexpr (Fetches) ahead.fetch();
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Bits x = (Bits)rows.at(r);
            tile[r][0] = fma_pairs(x, w0, tile[r][0]);
            tile[r][1] = fma_pairs(x, w1, tile[r][1]);
        }
        rows.advance(1);
    }
}

// Lanes of a row [k] of 8-bit activations. Each group of kGroup values has one lane for -128 times its sum, which
// corrects for the unsigned bytes of the weights, then four values per lane, then one lane for its scale.
constexpr int64_t int8_lanes(int64_t k) { return (k + 3) / 4 + 2 * groups(k); }

#if defined(__AVX512VNNI__)
inline void to_int8(const float* in, int64_t k, uint32_t* out) {
    for (int64_t from = 0; from < k; from += kGroup) {
        const int count = int(std::min(kGroup, k - from));
        Vec most = zero(), defect = zero();
        for (int i = 0; i < count; i += kLanes) {
            Vec x = load(in + from + i, std::min(kLanes, count - i));
            most = max(most, _mm512_abs_ps(x));
            defect = fma(x, zero(), defect);  // NaN if a value is NaN or infinite
        }
        const float largest = reduce_max(most);
        const Vec inverse = set1(largest > 0 ? 127 / largest : 0);
        Bits sum = _mm512_setzero_si512();
        for (int i = 0; i < count; i += kLanes) {
            const int n = std::min(kLanes, count - i);
            Bits bytes = _mm512_cvtps_epi32(mul(load(in + from + i, n), inverse));
            sum = _mm512_add_epi32(sum, bytes);
            _mm_mask_storeu_epi8(out + 1 + i / 4, __mmask16((1u << round_up(n, 4)) - 1), _mm512_cvtepi32_epi8(bytes));
        }
        *out = uint32_t(-128 * _mm512_reduce_add_epi32(sum));
        out += 1 + (count + 3) / 4;
        *out++ = std::bit_cast<uint32_t>(largest / 127 + reduce_add(defect));
    }
}

template <int R>
using Sums = Bits[R][2];

// The exact product of one group. Not inline, because the compiler would spill registers to keep the caller's tile.
template <int R>
[[gnu::noinline]] void dot_group(Sums<R>& out, const void* a, int64_t lda, const uint32_t* w, int64_t count,
                                 Ahead ahead) {
    Rows<R> rows(a, lda);
    Sums<R> sums;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_castps_si512(rows.at(r));
    rows.advance(1);
    for (int64_t i = 0; i < count; ++i, w += kPanel) {
        ahead.fetch();
        Bits w0 = load_bits(w), w1 = load_bits(w + kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Bits x = _mm512_castps_si512(rows.at(r));
            sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w0, x);
            sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w1, x);
        }
        rows.advance(1);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

// tile += a [R, k] * int8 panel: exact integers within a group, float32 across groups.
template <int R>
[[gnu::always_inline]] inline void dot_int8(Tile<R>& tile, const void* a, int64_t lda, const uint32_t* w, int64_t k,
                                            Ahead ahead) {
    Sums<R> sums;
    for (int64_t left = (k + 3) / 4; left > 0; left -= kGroup / 4) {
        const int64_t count = std::min(left, kGroup / 4);
        dot_group<R>(sums, a, lda, w, count, ahead);
        ahead.at += (count + 1) * ahead.step;
        a = static_cast<const uint32_t*>(a) + 1 + count;
        w += count * kPanel;
        const float* scales = reinterpret_cast<const float*>(w);
        Vec s0 = load(scales), s1 = load(scales + kLanes);
        w += kPanel;
        Rows<R> rows(a, lda);
        a = static_cast<const uint32_t*>(a) + 1;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            Vec x = rows.at(r);
            tile[r][0] = fma(mul(x, s0), _mm512_cvtepi32_ps(sums[r][0]), tile[r][0]);
            tile[r][1] = fma(mul(x, s1), _mm512_cvtepi32_ps(sums[r][1]), tile[r][1]);
        }
    }
}
constexpr bool kMultipliesBytes = true;
#else
constexpr bool kMultipliesBytes = false;
#endif

// What happens to a product.
enum class Into : int64_t {
    kStore,  // c = product + bias
    kAdd,    // c += product + bias: the residual
    kSilu,   // c = silu(gate) * up, of a paired matrix
    kGelu,   // c = gelu(gate) * up
};

// One matrix product: c [m, columns] from a [m, k]. If k is odd, rows of `a` need a finite number after the last.
struct Product {
    const float* a;  // strides of a and c count 32-bit lanes
    int64_t lda;
    int64_t m;
    const Matrix* w;
    float* c;
    int64_t ldc;
    int64_t columns;  // of c; may include the padding of the matrix's panels
    Into into;
    int64_t takes_pairs = 0;  // whether `a` is already rounded to pairs
    int64_t gives_pairs = 0;  // whether to round c to pairs; only for kSilu and kGelu
};

template <int R>
[[gnu::always_inline]] inline void finish(const Tile<R>& tile, const Product& product, int64_t row, int64_t panel) {
    const float* bias = product.w->bias;
    Vec bias0 = bias ? load(bias + panel * kPanel) : zero();
    Vec bias1 = bias ? load(bias + panel * kPanel + kLanes) : zero();
    auto put = [&](float* c, int64_t column, Vec value) {
        int64_t left = product.columns - column;
        if constexpr (kMultipliesPairs) {
            if (product.gives_pairs) {
                if (left > 0) store(reinterpret_cast<bf16*>(c) + column, value, int(std::min<int64_t>(left, kLanes)));
                return;
            }
        }
        if (left >= kLanes) {
            store(c + column, product.into == Into::kAdd ? add(load(c + column), value) : value);
        } else if (left > 0) {
            store(c + column, product.into == Into::kAdd ? add(load(c + column, left), value) : value, left);
        }
    };
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        float* c = product.c + (row + r) * product.ldc;
        Vec v0 = add(tile[r][0], bias0), v1 = add(tile[r][1], bias1);
        if (product.into == Into::kSilu) {
            put(c, panel * kLanes, mul(silu(v0), v1));
        } else if (product.into == Into::kGelu) {
            put(c, panel * kLanes, mul(gelu(v0), v1));
        } else {
            put(c, panel * kPanel, v0);
            put(c, panel * kPanel + kLanes, v1);
        }
    }
}

// Compute R rows from `row` on, for one panel. `a`: these rows in the format of the dot product.
template <int R>
void compute(const Product& product, const void* a, int64_t lda, int64_t row, int64_t panel, Ahead ahead) {
    const Matrix& w = *product.w;
    Tile<R> tile;
    clear<R>(tile);
    if (w.storage == Storage::kFloat32) {
        dot_f32<R, true>(tile, a, lda, w.panel(panel), w.k, ahead);
    } else if (w.storage == Storage::kInt8) {
#if defined(__AVX512VNNI__)
        dot_int8<R>(tile, a, lda, w.panel(panel), w.k, ahead);
#endif
    } else if constexpr (kMultipliesPairs) {
        dot_pairs<R, true>(tile, a, lda, w.panel(panel), (w.k + 1) / 2, ahead);
    } else {
        dot_bf16<R>(tile, a, lda, w.panel(panel), (w.k + 1) / 2, ahead);
    }
    finish<R>(tile, product, row, panel);
}

using Compute = void (*)(const Product&, const void*, int64_t, int64_t, int64_t, Ahead);

template <int... R>
constexpr std::array<Compute, sizeof...(R)> compute_table(std::integer_sequence<int, R...>) {
    return {compute<R + 1>...};
}
constexpr auto kCompute = compute_table(std::make_integer_sequence<int, kMaxRows>());

// Prefetch part `t` of `tiles` parts of a panel. Each tile of rows prefetches one part.
inline Ahead part_of_panel(const Matrix& w, int64_t panel, int64_t t, int64_t tiles) {
    const int64_t bytes = w.panel_lanes() * 4;
    return {reinterpret_cast<const char*>(w.panel(panel)) + t * bytes / tiles, kPanel * 4 / tiles + 1};
}

// Round rows of a product's activations to 8 bits or to bfloat16 pairs, as its weights need.
inline void round_rows(const Product& product, int64_t begin, int64_t end, uint32_t* out, int64_t lanes) {
    for (int64_t r = begin; r < end; ++r, out += lanes) {
        const float* in = product.a + r * product.lda;
        if (product.w->storage == Storage::kInt8) {
#if defined(__AVX512VNNI__)
            to_int8(in, product.w->k, out);
#endif
        } else {
            round_to_pairs(in, product.w->k, out);
        }
    }
}

// This thread's share of a product, as one phase of a Team or a Share.
//
// Rows are cut into blocks whose activations stay in the second-level cache while all panels are read; a panel is read
// from memory once per block. `room`: the thread's buffer for rounded activations.
template <class Workers>
void multiply(Workers& team, const Product& product, Buffer<uint32_t>& room) {
    // Size of a block in float32; pairs take half as much.
    constexpr int64_t kBlockBytes = (kMultipliesPairs ? 896 : 768) << 10;
    const Matrix& w = *product.w;
    int64_t most = std::max<int64_t>(kBlockBytes / (w.k * 4) / kMaxRows * kMaxRows, kMaxRows);
    int64_t blocks = (product.m + most - 1) / most, panels = w.panels();
    // Long runs of panels use the memory bandwidth best; short runs balance the work best.
    int64_t run = std::clamp<int64_t>(panels / (team.size() * 8), 1, 8), runs = (panels + run - 1) / run;
    const bool is_int8 = w.storage == Storage::kInt8;
    const bool rounds = is_int8 || (kMultipliesPairs && w.storage == Storage::kBfloat16 && !product.takes_pairs);
    int64_t rounded_block = -1, rounded_lanes = is_int8 ? int8_lanes(w.k) : (w.k + 1) / 2;
    for (int64_t piece; (piece = team.take()) < blocks * runs;) {
        int64_t block = piece / runs, first_panel = piece % runs * run;
        int64_t begin = block * product.m / blocks, end = (block + 1) * product.m / blocks;
        const void* a = product.a + begin * product.lda;
        int64_t lda = product.lda;
        if (rounds) {
            uint32_t* rounded = room.reserve(most * rounded_lanes);
            if (block != rounded_block) round_rows(product, begin, end, rounded, rounded_lanes);
            rounded_block = block;
            a = rounded, lda = rounded_lanes;
        }
        const int64_t tiles = (end - begin + kMaxRows - 1) / kMaxRows, end_panel = std::min(first_panel + run, panels);
        for (int64_t panel = first_panel; panel < end_panel; ++panel) {
            // Guess this thread's next run: usually, threads take runs in turn.
            const int64_t after = panel + 1 < end_panel ? panel + 1 : (piece + team.size()) % runs * run;
            for (int64_t t = 0; t < tiles; ++t) {
                int64_t from = t * (end - begin) / tiles, to = (t + 1) * (end - begin) / tiles;
                const void* rows = static_cast<const char*>(a) + from * lda * 4;
                Ahead ahead = tiles == 1 ? stream(w.panel(panel)) : part_of_panel(w, after, t, tiles);
                kCompute[to - from - 1](product, rows, lda, begin + from, panel, ahead);
            }
        }
    }
}

}  // namespace ramet
