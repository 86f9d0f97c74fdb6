// Products with weights of 4 to 8 bits: exact whole numbers within a group, float32 across groups.
#pragma once

#include <array>
#include <utility>

#include "buffer.h"
#include "matrix.h"
#include "rows.h"

namespace ramet {

// The parts of a chunk of `count` k of a panel.
struct Chunk {
    const uint8_t *codes, *planes, *scales, *halves;
    int64_t count;

    Chunk(const Matrix& w, const void* at, int64_t count)
        : codes(static_cast<const uint8_t*>(at)), planes(codes + count * (w.bits < 8 ? 4 : 8) / 8 * kPanel),
          scales(codes + count * w.bits / 8 * kPanel),
          halves(scales + count / w.group * (1 + w.has_minima) * kPanel), count(count) {}
};

// Call visit(chunk, its first k) for each chunk of a panel.
template <class Visit>
inline void each_chunk(const Matrix& w, int64_t panel, const Visit& visit) {
    const char* at = reinterpret_cast<const char*>(w.panel(panel));
    const int64_t end = round_up(w.k, 32);
    for (int64_t from = 0; from < end; from += kChunk, at += w.chunk_bytes(kChunk)) {
        visit(Chunk(w, at, std::min(kChunk, end - from)), from);
    }
}

// Codes of a chunk as bytes, and its scales and minima as floats, in the order of the chunk.
struct Unpacked {
    alignas(64) uint32_t codes[kChunk / 4 * kPanel];
    alignas(64) float scales[kChunk / 16 * kPanel];
    alignas(64) float minima[kChunk / 16 * kPanel];
};

inline void unpack_scales(const Matrix& w, const Chunk& chunk, Unpacked& out) {
    const int64_t groups = chunk.count / w.group;
    for (int64_t part = 0; part <= w.has_minima; ++part) {
        float* to = part ? out.minima : out.scales;
        const int64_t first = part * kPanel;
        for (int64_t i = 0; i < kPanel; i += kLanes) {
            const Vec all = w.is_nested ? load_halves(chunk.halves + 2 * (first + i)) : zero();
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t at = g * (1 + w.has_minima) * kPanel + first + i;
                store(to + g * kPanel + i,
                      w.is_nested ? mul(all, load_int8(chunk.scales + at)) : load_halves(chunk.scales + 2 * at));
            }
        }
    }
}

// `Planes`: bits behind the fourth.
template <int Planes>
inline void unpack_codes(const Chunk& chunk, uint32_t* out) {
    const int64_t bytes = chunk.count / 4 * (kPanel / 2);  // of a plane
    const uint8_t *in = chunk.codes, *plane = chunk.planes;
    for (int64_t i = 0; i < chunk.count / 8; ++i) {
        for (int64_t v = 0; v < kPanel; v += kLanes, in += 4 * kLanes) {
            const Bits both = load_bits(in);
            Bits low = low_halves(both), high = high_halves(both);
            const uint8_t* bits = plane + i * kPanel + v / 2;
            if constexpr (Planes > 0) low = add_bits<16>(low, bits), high = add_bits<16>(high, bits + kPanel / 2);
            if constexpr (Planes > 1) {
                low = add_bits<32>(low, bits + bytes), high = add_bits<32>(high, bits + bytes + kPanel / 2);
            }
            store_bits(out + 2 * i * kPanel + v, low);
            store_bits(out + (2 * i + 1) * kPanel + v, high);
        }
    }
}

inline const uint32_t* unpack(const Matrix& w, const Chunk& chunk, Unpacked& out) {
    unpack_scales(w, chunk, out);
    if (w.bits == 8) return reinterpret_cast<const uint32_t*>(chunk.codes);
    (w.bits == 4 ? unpack_codes<0> : w.bits == 5 ? unpack_codes<1> : unpack_codes<2>)(chunk, out.codes);
    return out.codes;
}

inline void unpack_column(const Matrix& w, int64_t panel, int64_t column, float* out) {
    Unpacked unpacked;
    each_chunk(w, panel, [&](const Chunk& chunk, int64_t from) {
        const uint32_t* codes = unpack(w, chunk, unpacked);
        for (int64_t i = 0; i < std::min(chunk.count, w.k - from); ++i) {
            const int64_t at = i / w.group * kPanel + column;
            const float q = float(codes[i / 4 * kPanel + column] >> (i % 4 * 8) & 255);
            out[from + i] = w.has_minima ? unpacked.scales[at] * q + unpacked.minima[at]
                                         : unpacked.scales[at] * (q - float(1 << (w.bits - 1)));
        }
    });
}

// A row of activations in 8 bits, by groups as the weights are: what the sum of products begins with (it moves codes
// to their zero); four values in each lane; the group's scale, and the scale times the sum of the values.
inline int64_t coded_lanes(const Matrix& w) { return round_up(w.k, 32) / w.group * (w.group / 4 + 3); }

inline void to_codes(const float* in, const Matrix& w, uint32_t* out) {
    for (int64_t from = 0; from < round_up(w.k, 32); from += w.group) {
        alignas(64) float x[32];
        alignas(64) int8_t bytes[32];
        Vec most = zero(), defect = zero();
        for (int64_t i = 0; i < w.group; i += kLanes) {
            const int left = int(std::clamp<int64_t>(w.k - from - i, 0, kLanes));
            const Vec v = left == kLanes ? load(in + from + i) : load(in + from + i, left);
            most = max(most, max(v, sub(zero(), v)));
            defect = fma(v, zero(), defect);  // NaN and infinities stay what they are
            store(x + i, v);
        }
        const float largest = reduce_max(most), scale = largest / 127 + reduce_add(defect);
        const Vec inverse = set1(largest > 0 ? 127 / largest : 0);
        for (int64_t i = 0; i < w.group; i += kLanes) store(x + i, round(mul(load(x + i), inverse)));
        int32_t sum = 0;
        for (int64_t i = 0; i < w.group; ++i) {
            bytes[i] = int8_t(int32_t(x[i]));
            sum += bytes[i];
        }
        *out++ = w.has_minima ? 0 : uint32_t(-sum) << (w.bits - 1);
        std::memcpy(out, bytes, size_t(w.group));
        out += w.group / 4;
        *out++ = std::bit_cast<uint32_t>(scale);
        *out++ = std::bit_cast<uint32_t>(scale * float(sum));
    }
}

// sums [R, kPanel] += a chunk's product with `a` [R, lanes of `coded_lanes`]. `Steps`: a fourth of a group's k. `Wide`:
// codes of 8 bits.
template <int R, int Steps, bool Wide>
void dot_codes(float* sums, const uint32_t* a, int64_t lda, const uint32_t* codes, const Unpacked& w, int64_t groups,
               bool has_minima, Ahead ahead) {
    // Sums of few rows stay in registers; for more, registers hold the dot products.
    constexpr bool kKeeps = R <= kMaxRows / 3;
    Vec kept[kKeeps ? R : 1][2];
    auto add_to = [&](int r, int half, Vec factor, Vec value) __attribute__((always_inline)) {
        float* to = sums + r * kPanel + half * kLanes;
        if constexpr (kKeeps) {
            kept[r][half] = fma(factor, value, kept[r][half]);
        } else {
            store(to, fma(factor, value, load(to)));
        }
    };
    if constexpr (kKeeps) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) kept[r][0] = load(sums + r * kPanel), kept[r][1] = load(sums + r * kPanel + kLanes);
    }
    Rows<R> rows(a, lda);
    for (int64_t g = 0; g < groups; ++g) {
        Bits dots[R][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) dots[r][0] = dots[r][1] = (Bits)rows.at(r);
        rows.advance(1);
#pragma GCC unroll 4
        for (int i = 0; i < Steps; ++i, codes += kPanel) {
            ahead.fetch();
            const Bits w0 = load_bits(codes), w1 = load_bits(codes + kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Bits x = (Bits)rows.at(r);
                dots[r][0] = dot_bytes<Wide>(dots[r][0], w0, x);
                dots[r][1] = dot_bytes<Wide>(dots[r][1], w1, x);
            }
            rows.advance(1);
        }
        const Vec s0 = load(w.scales + g * kPanel), s1 = load(w.scales + g * kPanel + kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec scale = rows.at(r);
            add_to(r, 0, mul(scale, s0), to_floats(dots[r][0]));
            add_to(r, 1, mul(scale, s1), to_floats(dots[r][1]));
        }
        if (has_minima) {
            const Vec m0 = load(w.minima + g * kPanel), m1 = load(w.minima + g * kPanel + kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Vec scaled = rows.at(r, 1);
                add_to(r, 0, scaled, m0);
                add_to(r, 1, scaled, m1);
            }
        }
        rows.advance(2);
    }
    if constexpr (kKeeps) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(sums + r * kPanel, kept[r][0]), store(sums + r * kPanel + kLanes, kept[r][1]);
    }
}

using DotCodes = void (*)(float*, const uint32_t*, int64_t, const uint32_t*, const Unpacked&, int64_t, bool, Ahead);

template <int Steps, bool Wide, int... R>
constexpr std::array<DotCodes, sizeof...(R)> dot_codes_table(std::integer_sequence<int, R...>) {
    return {dot_codes<R + 1, Steps, Wide>...};
}
template <int Steps, bool Wide>
constexpr auto kDotCodes = dot_codes_table<Steps, Wide>(std::make_integer_sequence<int, kMaxRows>());

inline DotCodes dot_codes_of(const Matrix& w, int64_t rows) {
    if (w.bits == 8) return (w.group == 16 ? kDotCodes<4, true> : kDotCodes<8, true>)[rows - 1];
    return (w.group == 16 ? kDotCodes<4, false> : kDotCodes<8, false>)[rows - 1];
}

// sums [rows, kPanel] = a panel's product with coded rows `a`.
inline void multiply_panel(const Matrix& w, int64_t panel, const uint32_t* a, int64_t lda, int64_t rows, float* sums) {
    static thread_local Unpacked unpacked;
    std::fill_n(sums, rows * kPanel, 0.0f);
    const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    each_chunk(w, panel, [&](const Chunk& chunk, int64_t) {
        const uint32_t* codes = unpack(w, chunk, unpacked);
        const int64_t groups = chunk.count / w.group;
        const int64_t bytes = w.chunk_bytes(chunk.count);
        Ahead ahead = {reinterpret_cast<const char*>(chunk.codes) + (8 << 10), 4 * bytes / chunk.count};
        for (int64_t t = 0; t < tiles; ++t, ahead.step = 0) {
            const int64_t from = t * rows / tiles, to = (t + 1) * rows / tiles;
            dot_codes_of(w, to - from)(sums + from * kPanel, a + from * lda, lda, codes, unpacked, groups, w.has_minima,
                                     ahead);
        }
        a += groups * (w.group / 4 + 3);
    });
}

}  // namespace ramet
