"""FlashInfer, an extra of the distribution (`ramet[cuda]`), imported when it is used."""

import os
from types import ModuleType


def load_flashinfer() -> ModuleType:
    """The package, set to its norms in CUDA: the default ones need one more package."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    import flashinfer

    return flashinfer
