// The operations of vec.h for AVX2 and FMA.
#pragma once

#include "x86.h"

namespace ramet {

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
inline Bits as_bits(Vec v) { return (Bits)v; }
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

}  // namespace ramet
