// AVX-512 with dot products of bytes (VNNI).
#pragma once

#include "avx512.h"

namespace ramet {

inline Bits dot_bytes(Bits sum, Bits codes, Bits x) { return _mm512_dpbusd_epi32(sum, codes, x); }

}  // namespace ramet
