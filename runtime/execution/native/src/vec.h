// Vector operations for the instruction set that this file is compiled for.
//
// All other files use `Vec` (kLanes floats) and `Bits` (kLanes 32-bit lanes), and so are written only once. A bfloat16
// is the upper half of a float. So a shift and a mask turn a 32-bit lane with two of them into two floats, without a
// conversion instruction.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ramet {

using bf16 = uint16_t;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// Round to nearest even.
inline bf16 to_bf16(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// By MXFP4's code: the number that it stands for, times 2, plus 16.
inline __m128i float4_table() { return _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4); }

#if defined(__AVX512F__)

using Vec = __m512;
using Bits = __m512i;
constexpr int kLanes = 16;
constexpr int kMaxRows = 12;  // 2 x 12 accumulators of 32 registers leave room for weights and a broadcast

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps((1u << n) - 1, p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, v); }
inline Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bits(void* p, Bits b) { _mm512_storeu_si512(p, b); }
inline Vec low_bf16(Bits b) { return _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)); }
inline Vec high_bf16(Bits b) { return _mm512_castsi512_ps(_mm512_and_epi32(b, _mm512_set1_epi32(int(0xffff0000)))); }
inline Vec load(const bf16* p) {
    return low_bf16(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// Bit i: whether lane i of a is at least that of b.
inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
// The lanes of a whose bits are set, the others of b.
inline Vec select(const uint8_t* bits, Vec a, Vec b) {
    __mmask16 mask;
    std::memcpy(&mask, bits, sizeof(mask));
    return _mm512_mask_blend_ps(mask, b, a);
}
inline float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec round(Vec v) { return _mm512_roundscale_ps(v, 0); }

// p * 2^n for p near 1 and n from `round`. Overflow gives infinity. Results that would be subnormal are 0, because
// processors compute with subnormal numbers a hundred times slower.
inline Vec scale(Vec p, Vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set1(-125), _CMP_GE_OQ), p, n);
}

// In each 128 bits: the sums over the four lanes of a, of b, of c and of d.
inline Vec sum4(Vec a, Vec b, Vec c, Vec d) {
    Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}
// Lane 4 i + j: the sum of lane j over all 128-bit parts of m[i].
inline Vec sum_quarters(const Vec (&m)[4]) {
    Vec a = add(_mm512_shuffle_f32x4(m[0], m[1], 0x88), _mm512_shuffle_f32x4(m[0], m[1], 0xdd));
    Vec b = add(_mm512_shuffle_f32x4(m[2], m[3], 0x88), _mm512_shuffle_f32x4(m[2], m[3], 0xdd));
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Transpose kLanes x kLanes 32-bit lanes.
inline void transpose(Vec (&m)[kLanes]) {
    Vec t[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(m[i], m[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(m[i], m[i + 1]);
    }
    // m[4 b + j]: column j of every 4 x 4 block of rows 4 b .. 4 b + 3
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        m[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        m[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        m[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        m[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 16
    for (int j = 0; j < 4; ++j) {
        Vec even_a = _mm512_shuffle_f32x4(m[j], m[4 + j], 0x88), odd_a = _mm512_shuffle_f32x4(m[j], m[4 + j], 0xdd);
        Vec even_b = _mm512_shuffle_f32x4(m[8 + j], m[12 + j], 0x88);
        Vec odd_b = _mm512_shuffle_f32x4(m[8 + j], m[12 + j], 0xdd);
        t[j] = _mm512_shuffle_f32x4(even_a, even_b, 0x88);
        t[4 + j] = _mm512_shuffle_f32x4(odd_a, odd_b, 0x88);
        t[8 + j] = _mm512_shuffle_f32x4(even_a, even_b, 0xdd);
        t[12 + j] = _mm512_shuffle_f32x4(odd_a, odd_b, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) m[i] = t[i];
}

// kLanes halves, or signed bytes.
inline Vec load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Vec load_int8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
// Whole numbers, as signed bytes.
inline void store_int8(void* p, Vec v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline Vec to_floats(Bits b) { return _mm512_cvtepi32_ps(b); }
// The lower and upper four bits of each byte.
inline Bits low_halves(Bits b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bits high_halves(Bits b) { return low_halves(_mm512_srli_epi16(b, 4)); }
inline Bits float4_numbers(Bits b) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(float4_table()), b); }
// `low` and the bits `mask` of each byte of `in`, moved by `left` places (to the right if negative).
[[gnu::always_inline]] inline Bits or_bits(Bits low, Bits in, int left, int8_t mask) {
    const Bits moved = left < 0 ? _mm512_srli_epi16(in, unsigned(-left)) : _mm512_slli_epi16(in, unsigned(left));
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(mask)));
}
// Products of bytes, `codes` without a sign, as sums of two in 16 bits; additions of these; sum + factor * two of them.
inline Bits multiply_bytes(Bits codes, Bits x) { return _mm512_maddubs_epi16(codes, x); }
inline Bits add_shorts(Bits a, Bits b) { return _mm512_add_epi16(a, b); }
inline Bits add_pairs(Bits sum, Bits shorts, int16_t factor) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(shorts, _mm512_set1_epi16(factor)));
}

#else  // AVX2 and FMA

using Vec = __m256;
using Bits = __m256i;
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;  // 2 x 6 accumulators of 16 registers

inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline void store(float* p, Vec v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
inline Bits load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_bits(void* p, Bits b) { _mm256_storeu_si256(static_cast<__m256i*>(p), b); }
inline Vec low_bf16(Bits b) { return _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)); }
inline Vec high_bf16(Bits b) {
    return _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32(int(0xffff0000))));
}
inline Vec load(const bf16* p) {
    return low_bf16(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline uint32_t at_least(Vec a, Vec b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
inline Vec select(const uint8_t* bits, Vec a, Vec b) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(*bits), lanes), lanes);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set));
}
inline float reduce_add(Vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec round(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// The same for n up to 128, which gives infinity.
inline Vec scale(Vec p, Vec n) {
    Vec small = _mm256_cmp_ps(n, set1(-125), _CMP_NGE_UQ);
    __m256i exponent = _mm256_cvtps_epi32(max(n, set1(-125)));
    Vec power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
    return _mm256_andnot_ps(small, mul(p, power));
}

inline Vec sum4(Vec a, Vec b, Vec c, Vec d) {
    Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}
inline Vec sum_quarters(const Vec (&m)[2]) {
    return add(_mm256_permute2f128_ps(m[0], m[1], 0x20), _mm256_permute2f128_ps(m[0], m[1], 0x31));
}

// Transpose kLanes x kLanes 32-bit lanes.
inline void transpose(Vec (&m)[kLanes]) {
    Vec t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(m[i], m[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(m[i], m[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
        m[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        m[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        m[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        m[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
        t[j] = _mm256_permute2f128_ps(m[j], m[4 + j], 0x20);
        t[4 + j] = _mm256_permute2f128_ps(m[j], m[4 + j], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) m[i] = t[i];
}

inline Vec load_halves(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
inline Vec load_int8(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
inline void store_int8(void* p, Vec v) {
    const Bits whole = _mm256_cvtps_epi32(v);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}
inline Vec to_floats(Bits b) { return _mm256_cvtepi32_ps(b); }
inline Bits low_halves(Bits b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
inline Bits high_halves(Bits b) { return low_halves(_mm256_srli_epi16(b, 4)); }
inline Bits float4_numbers(Bits b) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(float4_table()), b); }
[[gnu::always_inline]] inline Bits or_bits(Bits low, Bits in, int left, int8_t mask) {
    const Bits moved = left < 0 ? _mm256_srli_epi16(in, -left) : _mm256_slli_epi16(in, left);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(mask)));
}
inline Bits multiply_bytes(Bits codes, Bits x) { return _mm256_maddubs_epi16(codes, x); }
inline Bits add_shorts(Bits a, Bits b) { return _mm256_add_epi16(a, b); }
inline Bits add_pairs(Bits sum, Bits shorts, int16_t factor) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(shorts, _mm256_set1_epi16(factor)));
}

#endif

// Each lane of `sum` plus the products of its four bytes in `codes`, which have no sign, and in `x`: if kDotsBytes.
Bits dot_bytes(Bits sum, Bits codes, Bits x);
#if defined(__AVX512VNNI__)
constexpr bool kDotsBytes = true;
inline Bits dot_bytes(Bits sum, Bits codes, Bits x) { return _mm512_dpbusd_epi32(sum, codes, x); }
#else
constexpr bool kDotsBytes = false;
#endif

constexpr int kPanel = 2 * kLanes;  // columns that a micro-kernel computes at once

// Arithmetic with pairs of bfloat16, the first in the lower half of a lane: only where kMultipliesPairs.
// c + the two products of each lane, summed in float32.
Vec fma_pairs(Bits a, Bits b, Vec c);
// kPanel floats in order, rounded to pairs.
Bits to_pairs(Vec a, Vec b);
// The first n floats, rounded to pairs.
void store(bf16* p, Vec v, int n);
// kPanel pairs (a[i], b[i]), as two vectors in order.
void load_pairs(const void* a, const void* b, Bits& first, Bits& second);
#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
inline Vec fma_pairs(Bits a, Bits b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
inline Bits to_pairs(Vec a, Vec b) { return (Bits)_mm512_cvtne2ps_pbh(b, a); }
inline void store(bf16* p, Vec v, int n) {
    _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), (__m256i)_mm512_cvtneps_pbh(v));
}
inline void load_pairs(const void* a, const void* b, Bits& first, Bits& second) {
    // Lane i: number i of the first operand, and of the second, which follows at 32.
    const Bits lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Bits twice = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x10001));
    const Bits index = _mm512_add_epi16(twice, _mm512_set1_epi32(0x200000));
    first = _mm512_permutex2var_epi16(load_bits(a), index, load_bits(b));
    second = _mm512_permutex2var_epi16(load_bits(a), _mm512_add_epi16(index, _mm512_set1_epi16(16)), load_bits(b));
}
#else
constexpr bool kMultipliesPairs = false;
#endif
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

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace ramet
