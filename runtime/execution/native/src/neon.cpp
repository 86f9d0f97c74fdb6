// See setup.py for the flags.
#include "neon.h"

namespace ramet {

constexpr bool kDotsBytes = true, kSignedCodes = true, kMultipliesPairs = false;
inline bool supported() { return has_dot_products(); }

}  // namespace ramet

#include "api.h"
