// The operations of vec.h for AVX-512.
#pragma once

#include "x86.h"

namespace ramet {

inline bool supports_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

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
inline Bits as_bits(Vec v) { return (Bits)v; }
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
inline uint32_t at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Vec select(const uint8_t* bits, Vec a, Vec b) {
    __mmask16 mask;
    std::memcpy(&mask, bits, sizeof(mask));
    return _mm512_mask_blend_ps(mask, b, a);
}
inline float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
inline Vec round(Vec v) { return _mm512_roundscale_ps(v, 0); }

inline Vec scale(Vec p, Vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set1(-125), _CMP_GE_OQ), p, n);
}

inline Vec sum4(Vec a, Vec b, Vec c, Vec d) {
    Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}
inline Vec sum_quarters(const Vec (&m)[4]) {
    Vec a = add(_mm512_shuffle_f32x4(m[0], m[1], 0x88), _mm512_shuffle_f32x4(m[0], m[1], 0xdd));
    Vec b = add(_mm512_shuffle_f32x4(m[2], m[3], 0x88), _mm512_shuffle_f32x4(m[2], m[3], 0xdd));
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

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

inline Vec load_halves(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline Vec load_int8(const void* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline void store_int8(void* p, Vec v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline Vec to_floats(Bits b) { return _mm512_cvtepi32_ps(b); }
inline Bits low_halves(Bits b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline Bits high_halves(Bits b) { return low_halves(_mm512_srli_epi16(b, 4)); }
inline Bits float4_numbers(Bits b) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(float4_table()), b); }
[[gnu::always_inline]] inline Bits or_bits(Bits low, Bits in, int left, int8_t mask) {
    const Bits moved = left < 0 ? _mm512_srli_epi16(in, unsigned(-left)) : _mm512_slli_epi16(in, unsigned(left));
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(mask)));
}
inline Bits multiply_bytes(Bits codes, Bits x) { return _mm512_maddubs_epi16(codes, x); }
inline Bits add_shorts(Bits a, Bits b) { return _mm512_add_epi16(a, b); }
inline Bits add_pairs(Bits sum, Bits shorts, int16_t factor) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(shorts, _mm512_set1_epi16(factor)));
}

}  // namespace ramet
