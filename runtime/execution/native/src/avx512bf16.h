// AVX-512 with dot products of bytes and of bfloat16 pairs.
#pragma once

#include "avx512vnni.h"

namespace ramet {

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

}  // namespace ramet
