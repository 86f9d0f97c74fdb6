"""FlashInfer, imported only when it is used: an extra of the distribution (`ramet[cuda]`)."""

from __future__ import annotations

import os
from types import ModuleType


def load_flashinfer() -> ModuleType:
    """The package. Its norms come as CUDA kernels like the rest: the others need one more package."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    import flashinfer

    return flashinfer
