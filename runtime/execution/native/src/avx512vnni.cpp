// See pyproject.toml for the flags.
#include "api.h"
