// See setup.py for the flags.
#include "avx512.h"

namespace ramet {

constexpr bool kDotsBytes = false, kSignedCodes = false, kMultipliesPairs = false;
inline bool supported() { return supports_avx512(); }

}  // namespace ramet

#include "api.h"
