// See setup.py for the flags.
#include "avx512vnni.h"

namespace ramet {

constexpr bool kDotsBytes = true, kSignedCodes = false, kMultipliesPairs = false;
inline bool supported() { return supports_avx512() && __builtin_cpu_supports("avx512vnni"); }

}  // namespace ramet

#include "api.h"
