"""Lazy import of FlashInfer, which the extra `ramet[cuda]` installs."""

import os
from types import ModuleType


def load_flashinfer() -> ModuleType:
    """The package, with its CUDA norms selected: the default norms need one more package."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    import flashinfer

    return flashinfer
