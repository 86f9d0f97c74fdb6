// Vectors: the operations that an instruction set gives, and what follows from them.
//
// All other files use `Vec` (kLanes floats) and `Bits` (kLanes 32-bit lanes), and so are written only once. A .cpp file
// includes the file of its instruction set, which defines what this one declares, before any other.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "bf16.h"

namespace ramet {

// Constants of an instruction set, beside kLanes:
// - kMaxRows: of a micro-kernel's tile, which has 2 x kMaxRows accumulators;
// - kDotsBytes: it has `dot_bytes`, else `multiply_bytes`, `add_shorts`, `add_pairs` and `pin`;
// - kSignedCodes: `dot_bytes` takes signed bytes, so codes of 8 bits become 128 less (`less_128`);
// - kMultipliesPairs: it has the operations with pairs of bfloat16.
constexpr int kPanel = 2 * kLanes;  // columns that a micro-kernel computes at once
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Loads and stores, also of the first n lanes alone; the others are loaded as 0.
inline Vec zero();
inline Vec set1(float x);
inline Vec load(const float* p);
inline Vec load(const float* p, int n);
inline Vec load(const bf16* p);
inline void store(float* p, Vec v);
inline void store(float* p, Vec v, int n);
inline Bits load_bits(const void* p);
inline void store_bits(void* p, Bits b);
inline Bits as_bits(Vec v);

// The lower and the upper bfloat16 of each lane. A bfloat16 is the upper half of a float, so a shift and a mask turn a
// lane with two of them into two floats, without a conversion instruction.
inline Vec low_bf16(Bits b);
inline Vec high_bf16(Bits b);

inline Vec fma(Vec a, Vec b, Vec c);  // a * b + c, rounded once
inline Vec add(Vec a, Vec b);
inline Vec sub(Vec a, Vec b);
inline Vec mul(Vec a, Vec b);
inline Vec div(Vec a, Vec b);
// If a is NaN, max and min are b. If b is, they are b or a.
inline Vec max(Vec a, Vec b);
inline Vec min(Vec a, Vec b);
// Bit i: whether lane i of a is at least that of b.
inline uint32_t at_least(Vec a, Vec b);
// The lanes of a whose bits are set, the others of b.
inline Vec select(const uint8_t* bits, Vec a, Vec b);
inline float reduce_add(Vec v);
inline float reduce_max(Vec v);
inline Vec round(Vec v);  // to nearest even
// p * 2^n for p near 1 and n from `round`, at most 128. Overflow gives infinity. Results that would be subnormal, and
// those for NaN, are 0, because processors compute with subnormal numbers a hundred times slower.
inline Vec scale(Vec p, Vec n);

// In each 128 bits: the sums over the four lanes of a, of b, of c and of d.
inline Vec sum4(Vec a, Vec b, Vec c, Vec d);
// Lane 4 i + j: the sum of lane j over all 128-bit parts of m[i].
inline Vec sum_quarters(const Vec (&m)[kLanes / 4]);
// Transpose kLanes x kLanes 32-bit lanes.
inline void transpose(Vec (&m)[kLanes]);

// kLanes halves, or signed bytes.
inline Vec load_halves(const void* p);
inline Vec load_int8(const void* p);
// Whole numbers, as signed bytes.
inline void store_int8(void* p, Vec v);
inline Vec to_floats(Bits b);
// The lower and upper four bits of each byte.
inline Bits low_halves(Bits b);
inline Bits high_halves(Bits b);
// By MXFP4's code, in each byte: the number that it stands for, times 2, plus 16.
inline Bits float4_numbers(Bits b);
// `low` and the bits `mask` of each byte of `in`, moved by `left` places (to the right if negative).
inline Bits or_bits(Bits low, Bits in, int left, int8_t mask);

// Each lane of `sum` plus the products of its four bytes in `codes`, which have no sign, and in `x`.
Bits dot_bytes(Bits sum, Bits codes, Bits x);
// Bytes of 8 bits as `dot_bytes` takes them, if kSignedCodes.
Bits less_128(Bits codes);
// Products of bytes, `codes` without a sign, as sums of two in 16 bits; additions of these; sum + factor * two of them.
Bits multiply_bytes(Bits codes, Bits x);
Bits add_shorts(Bits a, Bits b);
Bits add_pairs(Bits sum, Bits shorts, int16_t factor);
// Keeps the compiler from moving what `b` is computed from.
template <class T>
void pin(T& b);

// Arithmetic with pairs of bfloat16, the first in the lower half of a lane.
// c + the two products of each lane, summed in float32.
Vec fma_pairs(Bits a, Bits b, Vec c);
// kPanel floats in order, rounded to pairs.
Bits to_pairs(Vec a, Vec b);
// The first n floats, rounded to pairs.
void store(bf16* p, Vec v, int n);
// kPanel pairs (a[i], b[i]), as two vectors in order.
void load_pairs(const void* a, const void* b, Bits& first, Bits& second);

// A waiting thread spins for `spin_ticks()` of the processor's clock before it sleeps.
inline uint64_t ticks();
inline void pause();

// Whether this processor has the instruction set.
inline bool supported();

// Round floats [n] to pairs [(n + 1) / 2]; `out` may be `in`. If n is odd, a finite number must follow the last.
inline void round_to_pairs(const float* in, int64_t n, uint32_t* out) {
    int64_t i = 0;
    if constexpr (kMultipliesPairs) {
        for (; i + kPanel <= n; i += kPanel) store_bits(out + i / 2, to_pairs(load(in + i), load(in + i + kLanes)));
    }
    for (; i < n; i += 2) {
        const uint32_t lane = to_bf16(in[i]) | uint32_t(to_bf16(in[i + 1])) << 16;
        std::memcpy(out + i / 2, &lane, sizeof(lane));
    }
}
// Whether numbers of type T are multiplied as pairs.
template <class T>
constexpr bool kPairs = kMultipliesPairs && sizeof(T) == 2;

// kPanel numbers as two vectors: floats in order; of bfloat16, first the numbers at even indices, then at odd ones.
inline void load_panel(const float* p, Vec& a, Vec& b) { a = load(p), b = load(p + kLanes); }
inline void load_panel(const bf16* p, Vec& a, Vec& b) {
    Bits bits = load_bits(p);
    a = low_bf16(bits), b = high_bf16(bits);
}
// Reorder floats, a multiple of kPanel, into the order in which `load_panel` returns numbers of type T, and back.
template <class T>
inline void split(float* x, int64_t n) {
    if (sizeof(T) == 4) return;
    for (float *end = x + n, panel[kPanel]; x < end; x += kPanel) {
        std::memcpy(panel, x, sizeof(panel));
        for (int i = 0; i < kLanes; ++i) x[i] = panel[2 * i], x[kLanes + i] = panel[2 * i + 1];
    }
}
template <class T>
inline void join(float* x, int64_t n) {
    if (sizeof(T) == 4) return;
    for (float *end = x + n, panel[kPanel]; x < end; x += kPanel) {
        std::memcpy(panel, x, sizeof(panel));
        for (int i = 0; i < kLanes; ++i) x[2 * i] = panel[i], x[2 * i + 1] = panel[kLanes + i];
    }
}

// 2^(x - base) for a whole base and x - base <= 128, within 2 units in the last place. 0 for x - base < -125.5,
// including -infinity, and for NaN: `scale` drops these results.
//
// Another base gives the same result times a power of two, to the bit.
inline Vec exp2(Vec x, Vec base) {
    Vec n = round(x), f = sub(x, n);
    // The polynomial of least relative error (1e-7) for 2^f on [-1/2, 1/2]; exact for 0.
    Vec p = set1(1.3264728e-3f);
    p = fma(p, f, set1(9.6715130e-3f));
    p = fma(p, f, set1(5.5507336e-2f));
    p = fma(p, f, set1(2.4022242e-1f));
    p = fma(p, f, set1(6.9314700e-1f));
    p = fma(p, f, set1(1.0f));
    return scale(p, sub(n, base));
}

// 2^n for a whole n of at most 0; 0 below -125.
inline float power_of_two(float n) { return n < -125 ? 0 : std::bit_cast<float>((127 + int32_t(n)) << 23); }

constexpr float kLog2E = 1.44269504f;

// x / (1 + e^-y): SiLU for y = x.
inline Vec gated(Vec x, Vec y) {
    // 2^128 is infinity already; clamp, because an infinite exponent would give NaN.
    Vec power = exp2(min(mul(y, set1(-kLog2E)), set1(128)), zero());
    return div(x, add(set1(1), power));
}

inline Vec silu(Vec x) { return gated(x, x); }

// GELU with the tanh approximation: x (1 + tanh y) / 2 = x / (1 + e^-2y), 2y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu(Vec x) {
    return gated(x, mul(x, fma(mul(x, x), set1(0.0713548163f), set1(1.5957691216f))));
}

// Loads and stores of all lanes, or of the first n. What a store of n lanes wrote can be loaded only after a while, so
// numbers that are used at once are stored as whole vectors where they fill them.
struct AllLanes {};
inline Vec load_lanes(const float* p, AllLanes) { return load(p); }
inline Vec load_lanes(const float* p, int n) { return load(p, n); }
inline void store_lanes(float* p, Vec v, AllLanes) { store(p, v); }
inline void store_lanes(float* p, Vec v, int n) { store(p, v, n); }

// Call visit(i, AllLanes()) for the whole vectors of `count` floats, and visit(i, n) for the n floats behind them.
template <class Visit>
[[gnu::always_inline]] inline void each_lanes(int64_t count, const Visit& visit) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) visit(i, AllLanes());
    if (i < count) visit(i, int(count - i));
}

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace ramet
