// NEON with dot products of bytes and of bfloat16 pairs.
#pragma once

#include "neon.h"

namespace ramet {

inline bfloat16x8_t pairs(uint32x4_t b) { return vreinterpretq_bf16_u32(b); }

inline Vec fma_pairs(Bits a, Bits b, Vec c) {
    return {vbfdotq_f32(c.low, pairs(a.low), pairs(b.low)), vbfdotq_f32(c.high, pairs(a.high), pairs(b.high))};
}
inline bfloat16x8_t rounded(Vec v) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.low), v.high); }
inline Bits to_pairs(Vec a, Vec b) {
    return {vreinterpretq_u32_bf16(rounded(a)), vreinterpretq_u32_bf16(rounded(b))};
}
inline void store(bf16* p, Vec v, int n) {
    const uint16x8_t all = vreinterpretq_u16_bf16(rounded(v));
    if (n == kLanes) return vst1q_u16(p, all);
    bf16 some[kLanes];
    vst1q_u16(some, all);
    std::copy_n(some, n, p);
}
inline void load_pairs(const void* a, const void* b, Bits& first, Bits& second) {
    const uint16_t *from = static_cast<const uint16_t*>(a), *other = static_cast<const uint16_t*>(b);
    const uint16x8_t a0 = vld1q_u16(from), a1 = vld1q_u16(from + 8), b0 = vld1q_u16(other), b1 = vld1q_u16(other + 8);
    first = {vreinterpretq_u32_u16(vzip1q_u16(a0, b0)), vreinterpretq_u32_u16(vzip2q_u16(a0, b0))};
    second = {vreinterpretq_u32_u16(vzip1q_u16(a1, b1)), vreinterpretq_u32_u16(vzip2q_u16(a1, b1))};
}

}  // namespace ramet
