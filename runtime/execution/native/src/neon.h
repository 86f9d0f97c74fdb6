// The operations of vec.h for NEON with dot products of bytes: ARMv8.2 and later.
#pragma once

#include <arm_neon.h>

#include <algorithm>

#include "bf16.h"
#include "system.h"

namespace ramet {

// Two registers each, so that a number that is broadcast for a row serves twice as many products.
struct Vec {
    float32x4_t low, high;
};
struct Bits {
    uint32x4_t low, high;
};
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;  // 2 x 6 x 2 accumulators of 32 registers

inline float32x4_t floats(uint32x4_t b) { return vreinterpretq_f32_u32(b); }
inline uint8x16_t bytes(uint32x4_t b) { return vreinterpretq_u8_u32(b); }
inline int8x16_t signed_bytes(uint32x4_t b) { return vreinterpretq_s8_u32(b); }
inline uint32x4_t lanes(uint8x16_t b) { return vreinterpretq_u32_u8(b); }

inline Vec zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline Vec set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, Vec v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }
inline Vec load(const float* p, int n) {
    if (n == kLanes) return load(p);
    float all[kLanes] = {};
    std::copy_n(p, n, all);
    return load(all);
}
inline void store(float* p, Vec v, int n) {
    if (n == kLanes) return store(p, v);
    float all[kLanes];
    store(all, v);
    std::copy_n(all, n, p);
}
inline Vec load(const bf16* p) {
    return {floats(vshll_n_u16(vld1_u16(p), 16)), floats(vshll_n_u16(vld1_u16(p + 4), 16))};
}
inline Bits load_bits(const void* p) {
    return {vld1q_u32(static_cast<const uint32_t*>(p)), vld1q_u32(static_cast<const uint32_t*>(p) + 4)};
}
inline void store_bits(void* p, Bits b) {
    vst1q_u32(static_cast<uint32_t*>(p), b.low), vst1q_u32(static_cast<uint32_t*>(p) + 4, b.high);
}
inline Bits as_bits(Vec v) { return {vreinterpretq_u32_f32(v.low), vreinterpretq_u32_f32(v.high)}; }
inline Vec low_bf16(Bits b) { return {floats(vshlq_n_u32(b.low, 16)), floats(vshlq_n_u32(b.high, 16))}; }
inline Vec high_bf16(Bits b) {
    const uint32x4_t mask = vdupq_n_u32(0xffff0000);
    return {floats(vandq_u32(b.low, mask)), floats(vandq_u32(b.high, mask))};
}

inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Vec max(Vec a, Vec b) { return {vmaxnmq_f32(a.low, b.low), vmaxnmq_f32(a.high, b.high)}; }
inline Vec min(Vec a, Vec b) { return {vminnmq_f32(a.low, b.low), vminnmq_f32(a.high, b.high)}; }
inline Vec round(Vec v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }
inline float reduce_add(Vec v) { return vaddvq_f32(vaddq_f32(v.low, v.high)); }
inline float reduce_max(Vec v) { return vmaxnmvq_f32(vmaxnmq_f32(v.low, v.high)); }

// The bit of each lane in a byte.
inline Bits bit_of_lane() {
    static constexpr uint32_t kBits[] = {1, 2, 4, 8, 16, 32, 64, 128};
    return load_bits(kBits);
}
inline uint32_t at_least(Vec a, Vec b) {
    const Bits bit = bit_of_lane();
    const uint32x4_t low = vandq_u32(vcgeq_f32(a.low, b.low), bit.low);
    return vaddvq_u32(vorrq_u32(low, vandq_u32(vcgeq_f32(a.high, b.high), bit.high)));
}
inline Vec select(const uint8_t* bits, Vec a, Vec b) {
    const uint32x4_t all = vdupq_n_u32(*bits);
    const Bits bit = bit_of_lane();
    return {vbslq_f32(vtstq_u32(all, bit.low), a.low, b.low), vbslq_f32(vtstq_u32(all, bit.high), a.high, b.high)};
}

inline float32x4_t scale(float32x4_t p, float32x4_t n) {
    const float32x4_t least = vdupq_n_f32(-125);
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(vmaxnmq_f32(n, least)), vdupq_n_s32(127));
    const float32x4_t scaled = vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    return floats(vandq_u32(vreinterpretq_u32_f32(scaled), vcgeq_f32(n, least)));
}
inline Vec scale(Vec p, Vec n) { return {scale(p.low, n.low), scale(p.high, n.high)}; }

inline float32x4_t sum4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}
inline Vec sum4(Vec a, Vec b, Vec c, Vec d) {
    return {sum4(a.low, b.low, c.low, d.low), sum4(a.high, b.high, c.high, d.high)};
}
inline Vec sum_quarters(const Vec (&m)[2]) {
    return {vaddq_f32(m[0].low, m[0].high), vaddq_f32(m[1].low, m[1].high)};
}

inline void transpose(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float32x4_t ac = vzip1q_f32(a, c), ac2 = vzip2q_f32(a, c), bd = vzip1q_f32(b, d), bd2 = vzip2q_f32(b, d);
    a = vzip1q_f32(ac, bd), b = vzip2q_f32(ac, bd), c = vzip1q_f32(ac2, bd2), d = vzip2q_f32(ac2, bd2);
}
inline void transpose(Vec (&m)[kLanes]) {
    transpose(m[0].low, m[1].low, m[2].low, m[3].low);
    transpose(m[0].high, m[1].high, m[2].high, m[3].high);
    transpose(m[4].low, m[5].low, m[6].low, m[7].low);
    transpose(m[4].high, m[5].high, m[6].high, m[7].high);
    std::swap(m[0].high, m[4].low), std::swap(m[1].high, m[5].low);
    std::swap(m[2].high, m[6].low), std::swap(m[3].high, m[7].low);
}

inline Vec load_halves(const void* p) {
    const uint16x8_t halves = vld1q_u16(static_cast<const uint16_t*>(p));
    return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves))),
            vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(halves)))};
}
inline Vec load_int8(const void* p) {
    const int16x8_t whole = vmovl_s8(vld1_s8(static_cast<const int8_t*>(p)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(whole))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(whole)))};
}
inline void store_int8(void* p, Vec v) {
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(v.low)), high = vqmovn_s32(vcvtnq_s32_f32(v.high));
    vst1_s8(static_cast<int8_t*>(p), vqmovn_s16(vcombine_s16(low, high)));
}
inline Vec to_floats(Bits b) {
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(b.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(b.high))};
}
inline Bits low_halves(Bits b) {
    const uint8x16_t mask = vdupq_n_u8(15);
    return {lanes(vandq_u8(bytes(b.low), mask)), lanes(vandq_u8(bytes(b.high), mask))};
}
inline Bits high_halves(Bits b) {
    return {lanes(vshrq_n_u8(bytes(b.low), 4)), lanes(vshrq_n_u8(bytes(b.high), 4))};
}
inline Bits float4_numbers(Bits b) {
    static constexpr uint8_t kNumbers[] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
    const uint8x16_t table = vld1q_u8(kNumbers);
    return {lanes(vqtbl1q_u8(table, bytes(b.low))), lanes(vqtbl1q_u8(table, bytes(b.high)))};
}
[[gnu::always_inline]] inline uint32x4_t or_bits(uint32x4_t low, uint32x4_t in, int left, int8_t mask) {
    // Operators, because the count of an intrinsic is a constant before functions are inlined.
    const uint8x16_t count = vdupq_n_u8(uint8_t(left < 0 ? -left : left));
    const uint8x16_t moved = left < 0 ? bytes(in) >> count : bytes(in) << count;
    return vorrq_u32(low, lanes(vandq_u8(moved, vdupq_n_u8(uint8_t(mask)))));
}
[[gnu::always_inline]] inline Bits or_bits(Bits low, Bits in, int left, int8_t mask) {
    return {or_bits(low.low, in.low, left, mask), or_bits(low.high, in.high, left, mask)};
}
inline Bits less_128(Bits codes) {
    const uint32x4_t top = vdupq_n_u32(0x80808080);
    return {veorq_u32(codes.low, top), veorq_u32(codes.high, top)};
}
inline uint32x4_t dot_bytes(uint32x4_t sum, uint32x4_t codes, uint32x4_t x) {
    return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(sum), signed_bytes(codes), signed_bytes(x)));
}
inline Bits dot_bytes(Bits sum, Bits codes, Bits x) {
    return {dot_bytes(sum.low, codes.low, x.low), dot_bytes(sum.high, codes.high, x.high)};
}

inline uint64_t ticks() {
    uint64_t now;
    asm volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
}
inline uint64_t spin_ticks() {
    uint64_t a_second;
    asm("mrs %0, cntfrq_el0" : "=r"(a_second));
    return a_second / 25'000;
}
inline void pause() { asm volatile("yield"); }

}  // namespace ramet
