// See setup.py for the flags.
#include "neonbf16.h"

namespace ramet {

constexpr bool kDotsBytes = true, kSignedCodes = true, kMultipliesPairs = true;
inline bool supported() { return has_dot_products() && has_bfloat16(); }

}  // namespace ramet

#include "api.h"
