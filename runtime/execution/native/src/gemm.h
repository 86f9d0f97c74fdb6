// Activations times packed weights, with the same micro-kernel for any number of rows.
#pragma once

#include "codes.h"

namespace ramet {

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
            Bits x = as_bits(rows.at(r));
            tile[r][0] = fma_pairs(x, w0, tile[r][0]);
            tile[r][1] = fma_pairs(x, w1, tile[r][1]);
        }
        rows.advance(1);
    }
}

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
    const int64_t bytes = w.panel_bytes();
    return {reinterpret_cast<const char*>(w.panel(panel)) + t * bytes / tiles, kPanel * 4 / tiles + 1};
}

// Round rows of a product's activations to 8 bits or to bfloat16 pairs, as its weights need.
inline void round_rows(const Product& product, int64_t begin, int64_t end, uint32_t* out, int64_t lanes) {
    const Matrix& w = *product.w;
    for (int64_t r = begin; r < end; ++r) {
        const float* in = product.a + r * product.lda;
        if (w.storage == Storage::kCodes) {
            (w.group == 16 ? to_codes<16> : to_codes<32>)(in, w, r - begin, end - begin, out);
        } else {
            round_to_pairs(in, w.k, out + (r - begin) * lanes);
        }
    }
}

// Multiply one panel of codes with rows [begin, end); `a` holds these rows as codes.
inline void compute_codes(const Product& product, const void* a, int64_t begin, int64_t end, int64_t panel) {
    static thread_local Buffer<float> room;
    float* sums = room.reserve((end - begin) * kPanel);
    multiply_panel(*product.w, panel, static_cast<const uint32_t*>(a), end - begin, sums);
    for (int64_t r = begin; r < end; ++r, sums += kPanel) {
        const Tile<1> tile = {{load(sums), load(sums + kLanes)}};
        finish<1>(tile, product, r, panel);
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
    const bool is_coded = w.storage == Storage::kCodes;
    const bool rounds = is_coded || (kMultipliesPairs && w.storage == Storage::kBfloat16 && !product.takes_pairs);
    const int64_t rounded_lanes = is_coded ? coded_lanes(w) : (w.k + 1) / 2, row_lanes = is_coded ? rounded_lanes : w.k;
    int64_t most = std::max<int64_t>(kBlockBytes / (row_lanes * 4) / kMaxRows * kMaxRows, kMaxRows);
    int64_t blocks = (product.m + most - 1) / most, panels = w.panels();
    // Long runs of panels use the memory bandwidth best; short runs balance the work best.
    int64_t run = std::clamp<int64_t>(panels / (team.size() * 8), 1, 8), runs = (panels + run - 1) / run;
    int64_t rounded_block = -1;
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
            if (is_coded) {
                compute_codes(product, a, begin, end, panel);
                continue;
            }
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
