// See setup.py for the flags.
#include "avx2.h"

namespace ramet {

constexpr bool kDotsBytes = false, kSignedCodes = false, kMultipliesPairs = false;
inline bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

}  // namespace ramet

#include "api.h"
