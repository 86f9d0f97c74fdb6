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

// Scales (part 0) or minima (part 1) of a group, for columns [first, first + kLanes).
[[gnu::always_inline]] inline Vec scales_of(const Matrix& w, const Chunk& chunk, int64_t group, int64_t part,
                                            int64_t first) {
    const int64_t at = (group * (1 + w.has_minima) + part) * kPanel + first;
    if (!w.is_nested) return load_halves(chunk.scales + 2 * at);
    return mul(load_halves(chunk.halves + 2 * (part * kPanel + first)), load_int8(chunk.scales + at));
}

// The width of MXFP4's floats: 4 bits, which stand for numbers of 5.
constexpr int kFloat4 = 9;
constexpr int number_bits(int width) { return width == kFloat4 ? 5 : width; }

// Codes of `Width` bits of four k, `step` of them behind `at`, in half a panel, as bytes. `step` counts from a multiple
// of 4, except for codes of 8 bits; the compiler must know it.
template <int Width>
[[gnu::always_inline]] inline Bits codes_of(const uint8_t* at, const uint8_t* planes, int step, int half) {
    if constexpr (Width == 8) return load_bits(at + 4 * (step * kPanel + half * kLanes));
    const Bits both = load_bits(at + 4 * (step / 2 * kPanel + half * kLanes));
    const Bits low = step % 2 ? high_halves(both) : low_halves(both);
    const int place = 2 * half + step % 2;
    if constexpr (Width == 5) {
        return or_bits(low, load_bits(planes + step / 4 * 4 * kLanes), 4 - (step / 2 % 2 * 4 + place), 16);
    }
    if constexpr (Width == 6) return or_bits(low, load_bits(planes + step / 2 * 4 * kLanes), 4 - 2 * place, 48);
    return Width == kFloat4 ? float4_numbers(low) : low;
}

// Codes of a chunk as bytes, and its scales and minima as floats, in the order of the chunk.
struct Unpacked {
    alignas(64) uint32_t codes[kChunk / 4 * kPanel];
    alignas(64) float scales[kChunk / 16 * kPanel];
    alignas(64) float minima[kChunk / 16 * kPanel];
};

template <int Width>
inline void unpack_codes(const Chunk& chunk, uint32_t* out) {
    const uint8_t *codes = chunk.codes, *planes = chunk.planes;
    for (int64_t i = 0; i < chunk.count; i += 16, codes += 8 * kPanel, planes += (Width - 4) * 2 * kPanel) {
#pragma GCC unroll 8
        for (int at = 0; at < 8; ++at, out += kLanes) store_bits(out, codes_of<Width>(codes, planes, at / 2, at % 2));
    }
}

inline const uint32_t* unpack(const Matrix& w, const Chunk& chunk, Unpacked& out) {
    for (int64_t g = 0; g < chunk.count / w.group; ++g) {
        for (int64_t i = 0; i < kPanel; i += kLanes) {
            store(out.scales + g * kPanel + i, scales_of(w, chunk, g, 0, i));
            if (w.has_minima) store(out.minima + g * kPanel + i, scales_of(w, chunk, g, 1, i));
        }
    }
    if (w.bits == 8) return reinterpret_cast<const uint32_t*>(chunk.codes);
    auto of_width = w.is_float ? unpack_codes<kFloat4> : w.bits == 4 ? unpack_codes<4>
                  : w.bits == 5 ? unpack_codes<5> : unpack_codes<6>;
    of_width(chunk, out.codes);
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
                                         : unpacked.scales[at] * (q - float(1 << w.zero_bit()));
        }
    });
}

// A row of activations in 8 bits, by groups as the weights are: what the sum of products begins with (it moves codes
// to their zero); four values in each lane; the group's scale, and the scale times the sum of the values.
inline int64_t coded_lanes(const Matrix& w) { return round_up(w.k, 32) / w.group * (w.group / 4 + 3); }

// The zero of codes, as `dot_bytes` takes them. With minima, the minima move them to their zero.
inline uint32_t codes_zero(const Matrix& w) {
    const uint32_t zero = w.has_minima ? 0 : 1u << w.zero_bit();
    return kSignedCodes && w.bits == 8 ? zero - 128 : zero;
}

// Round row `row` of `rows`. They are stored from `start` on, chunk by chunk, so that a tile of rows reads one stream.
template <int Group>
void to_codes(const float* in, const Matrix& w, int64_t row, int64_t rows, uint32_t* start) {
    constexpr int kVectors = Group / kLanes;
    constexpr int64_t kWidth = Group / 4 + 3;
    const int64_t end = round_up(w.k, 32);
    uint32_t* out = start;
    for (int64_t from = 0; from < end; from += Group, out += kWidth) {
        if (from % kChunk == 0) out = start + (from * rows + std::min(kChunk, end - from) * row) / Group * kWidth;
        Vec x[kVectors], most = zero(), sum = zero();
        for (int i = 0; i < kVectors; ++i) {
            const int left = int(std::clamp<int64_t>(w.k - from - i * kLanes, 0, kLanes));
            x[i] = left == kLanes ? load(in + from + i * kLanes) : load(in + from + i * kLanes, left);
            most = max(most, max(x[i], sub(zero(), x[i])));
        }
        // The quotient of a smaller number could be infinite.
        const float largest = reduce_max(most), inverse = largest > 1e-30f ? 127 / largest : 0;
        for (int i = 0; i < kVectors; ++i) {
            const Vec rounded = round(mul(x[i], set1(inverse)));
            store_int8(out + 1 + i * (kLanes / 4), rounded);
            sum = add(sum, rounded);
        }
        // NaN and infinities make the sum NaN, and so the scale.
        const float total = reduce_add(sum), scale = largest / 127 + 0 * total;
        out[0] = uint32_t(-int32_t(total)) * codes_zero(w);
        out[kWidth - 2] = std::bit_cast<uint32_t>(scale);
        out[kWidth - 1] = std::bit_cast<uint32_t>(scale * total);
    }
}

// A dot product of codes and activations in each lane, over the `Steps` times four k of a group.
template <int Width, int Steps>
class Dot {
    // Codes of 8 bits are multiplied in halves. Products of so many steps fit into sums of 16 bits.
    static constexpr bool kHalves = Width == 8;
    static constexpr int kFit = std::min(Steps, 129 / (kHalves ? 15 : (1 << number_bits(Width)) - 1));
    Bits sum_, low_, high_;

  public:
    [[gnu::always_inline]] void begin(Bits sum) { sum_ = sum; }
    [[gnu::always_inline]] void add(int step, Bits codes, Bits x) {
        if constexpr (kDotsBytes) {
            sum_ = dot_bytes(sum_, codes, x);
        } else {
            const Bits low = multiply_bytes(kHalves ? low_halves(codes) : codes, x);
            low_ = step % kFit ? add_shorts(low_, low) : low;
            if (kHalves) {
                const Bits high = multiply_bytes(high_halves(codes), x);
                high_ = step % kFit ? add_shorts(high_, high) : high;
            }
            // Without this, the compiler would reorder the additions, and run out of registers.
            pin(low_);
            if (kHalves) pin(high_);
            if (step % kFit < kFit - 1) return;
            sum_ = add_pairs(sum_, low_, 1);
            if (kHalves) sum_ = add_pairs(sum_, high_, 16);
        }
    }
    [[gnu::always_inline]] Vec get() const { return to_floats(sum_); }
};

// Whether loads and stores of sums would take longer than dot products: of 64 bytes, but not of 16.
constexpr bool kKeepsSums = kDotsBytes && kLanes == 16;
// Rows whose sums stay in registers beside the dot products.
constexpr int kKeptRows = kKeepsSums ? kMaxRows / 2 : kMaxRows / 3;
// Rows of a tile: of codes of 8 bits without `dot_bytes`, each has two dot products.
template <int Width>
constexpr int kCodedRows = kKeepsSums ? kKeptRows : Width != 8 || kDotsBytes ? kMaxRows : kMaxRows / 2;

// A chunk's weights for `dot_codes`, unpacked before.
template <int Width, int Steps>
struct Prepared {
    const Matrix& w;
    const uint32_t* codes;
    const Unpacked& unpacked;

    [[gnu::always_inline]] Bits codes_at(int64_t group, int step, int half) const {
        return load_bits(codes + (group * Steps + step) * kPanel + half * kLanes);
    }
    [[gnu::always_inline]] Vec scales_at(int64_t group, int64_t part, int half) const {
        return load((part ? unpacked.minima : unpacked.scales) + group * kPanel + half * kLanes);
    }
};

// The same, unpacked where it is used: faster if that is once.
template <int Width, int Steps>
struct Packed {
    const Matrix& w;
    const Chunk& chunk;

    [[gnu::always_inline]] Bits codes_at(int64_t group, int step, int half) const {
        constexpr int kBytes = Steps * kPanel / 2;  // of a bit of a group's codes
        return codes_of<Width>(chunk.codes + group * kBytes * (Width == 8 ? 8 : 4),
                               chunk.planes + group * kBytes * (Width - 4), step, half);
    }
    [[gnu::always_inline]] Vec scales_at(int64_t group, int64_t part, int half) const {
        return scales_of(w, chunk, group, part, half * kLanes);
    }
};

// sums [R, kPanel] += a chunk's product with `a` [R, lanes of `coded_lanes`]. `Steps`: a fourth of a group's k.
template <int R, int Width, int Steps, template <int, int> class Weights>
void dot_codes(float* sums, const uint32_t* a, int64_t lda, const Weights<Width, Steps>& weights, int64_t groups,
               Ahead ahead) {
    constexpr bool kKeeps = R <= kKeptRows;
    // Without room for both halves' parts in registers, the halves come one after the other.
    constexpr bool kSplits = Width == 8 && !kDotsBytes;
    const bool has_minima = weights.w.has_minima;
    Tile<kKeeps ? R : 1> kept;
    if constexpr (kKeeps) load<R>(kept, sums, kPanel);
    Rows<R> rows(a, lda);
    for (int64_t g = 0; g < groups; ++g) {
        Dot<Width, Steps> dots[R][2];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            dots[r][0].begin(as_bits(rows.at(r)));
            dots[r][1].begin(as_bits(rows.at(r)));
        }
        ahead.fetch();
#pragma GCC unroll 8
        for (int i = 0; i < Steps; ++i) {
            Bits w0 = weights.codes_at(g, i, 0), w1 = weights.codes_at(g, i, 1);
            if constexpr (kSignedCodes && Width == 8) w0 = less_128(w0), w1 = less_128(w1);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Bits x = as_bits(rows.at(r, 1 + i));
                dots[r][0].add(i, w0, x);
                if (!kSplits) dots[r][1].add(i, w1, x);
            }
#pragma GCC unroll 16
            for (int r = 0; r < (kSplits ? R : 0); ++r) dots[r][1].add(i, w1, as_bits(rows.at(r, 1 + i)));
        }
        const Vec s0 = weights.scales_at(g, 0, 0), s1 = weights.scales_at(g, 0, 1);
        const Vec m0 = has_minima ? weights.scales_at(g, 1, 0) : zero();
        const Vec m1 = has_minima ? weights.scales_at(g, 1, 1) : zero();
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            float* to = sums + r * kPanel;
            const Vec scale = rows.at(r, Steps + 1), scaled = rows.at(r, Steps + 2);
            Vec sum0, sum1;
            if constexpr (kKeeps) {
                sum0 = kept[r][0], sum1 = kept[r][1];
            } else {
                sum0 = load(to), sum1 = load(to + kLanes);
            }
            sum0 = fma(mul(scale, s0), dots[r][0].get(), sum0), sum1 = fma(mul(scale, s1), dots[r][1].get(), sum1);
            if (has_minima) sum0 = fma(scaled, m0, sum0), sum1 = fma(scaled, m1, sum1);
            if constexpr (kKeeps) {
                kept[r][0] = sum0, kept[r][1] = sum1;
            } else {
                store(to, sum0), store(to + kLanes, sum1);
            }
        }
        rows.advance(Steps + 3);
    }
    if constexpr (kKeeps) store<R>(sums, kPanel, kept);
}

template <int Width, int Steps, template <int, int> class Weights>
using DotCodes = void (*)(float*, const uint32_t*, int64_t, const Weights<Width, Steps>&, int64_t, Ahead);

template <int Width, int Steps, template <int, int> class Weights, int... R>
constexpr std::array<DotCodes<Width, Steps, Weights>, sizeof...(R)> dot_codes_table(std::integer_sequence<int, R...>) {
    return {dot_codes<R + 1, Width, Steps, Weights>...};
}
template <int Width, int Steps, template <int, int> class Weights, int Most>
constexpr auto kDotCodes = dot_codes_table<Width, Steps, Weights>(std::make_integer_sequence<int, Most>());

// sums [rows, kPanel] = a panel's product with coded rows `a`.
template <int Width, int Steps>
void multiply_panel(const Matrix& w, int64_t panel, const uint32_t* a, int64_t rows, float* sums) {
    static thread_local Unpacked unpacked;
    constexpr int kMost = kCodedRows<Width>;
    // Rows for which unpacking where codes are used is faster, even twice.
    constexpr int kFew = kDotsBytes && Width != 6 ? 2 * kKeptRows : kKeptRows;
    std::fill_n(sums, rows * kPanel, 0.0f);
    const int64_t tiles = (rows + kMost - 1) / kMost;
    each_chunk(w, panel, [&](const Chunk& chunk, int64_t) {
        const int64_t groups = chunk.count / w.group, bytes = w.chunk_bytes(chunk.count), lda = groups * (Steps + 3);
        Ahead ahead = {reinterpret_cast<const char*>(chunk.codes) + (8 << 10), bytes / groups};
        auto multiply_tiles = [&](const auto& table, const auto& weights) {
            for (int64_t t = 0; t < tiles; ++t, ahead.step = 0) {
                const int64_t from = t * rows / tiles, to = (t + 1) * rows / tiles;
                table[to - from - 1](sums + from * kPanel, a + from * lda, lda, weights, groups, ahead);
            }
        };
        if (rows <= kFew) {
            multiply_tiles(kDotCodes<Width, Steps, Packed, kMost>, Packed<Width, Steps>{w, chunk});
        } else {
            const Prepared<Width, Steps> weights = {w, unpack(w, chunk, unpacked), unpacked};
            multiply_tiles(kDotCodes<Width, Steps, Prepared, kMost>, weights);
        }
        a += rows * lda;
    });
}

inline void multiply_panel(const Matrix& w, int64_t panel, const uint32_t* a, int64_t rows, float* sums) {
    auto of_width = w.is_float ? multiply_panel<kFloat4, 8> : w.bits == 8 ? multiply_panel<8, 8>
                  : w.bits == 6 ? multiply_panel<6, 4> : w.bits == 5 ? multiply_panel<5, 8> : multiply_panel<4, 8>;
    of_width(w, panel, a, rows, sums);
}

}  // namespace ramet
