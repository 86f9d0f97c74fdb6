"""The FlashInfer package, which the extra `ramet[cuda]` installs: its version, and its import when it is needed."""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

# The only version that Ramet calls: older ones refuse masks, and later ones keep compiled kernels elsewhere.
VERSION = "0.6.18.post1"
# What computing without FlashInfer costs on a GPU. A Llama's layer launches 11 kernels with it, and in torch 20 to 35.
COST = (
    "torch copies the KV that a step reads in every layer, launches two to three times as many kernels a layer, runs "
    "decode steps without CUDA graphs, and sorts to filter tokens"
)


def load_flashinfer() -> ModuleType:
    """The package, with its CUDA norms selected: the default norms need one more package."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    import flashinfer

    return flashinfer


def flashinfer_fault() -> str | None:
    """Why the installed FlashInfer cannot be used, and the remedy; None: it has the right version."""
    if find_spec("flashinfer") is None:
        return "FlashInfer is missing: `make extra-cuda`"
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        found = "of an unknown version"
    if found.partition("+")[0] == VERSION:
        return None
    return f"FlashInfer {found} is installed, and Ramet calls {VERSION}: `make extra-cuda`"
