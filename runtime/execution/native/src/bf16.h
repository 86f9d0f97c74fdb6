// bfloat16: the upper half of a float.
#pragma once

#include <bit>
#include <cstdint>

namespace ramet {

using bf16 = uint16_t;

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x) << 16); }

// Round to nearest even.
inline bf16 to_bf16(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace ramet
