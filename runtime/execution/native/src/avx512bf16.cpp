// See setup.py for the flags.
#include "avx512bf16.h"

namespace ramet {

constexpr bool kDotsBytes = true, kSignedCodes = false, kMultipliesPairs = true;
inline bool supported() {
    return supports_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

}  // namespace ramet

#include "api.h"
