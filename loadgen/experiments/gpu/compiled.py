"""FlashInfer's kernels that were compiled ahead of time, and whether they load."""

from importlib.util import find_spec
from pathlib import Path

from loadgen.experiments.gpu.aot import PACKAGE


def compiled() -> list[str]:
    """Names of the libraries in the package of kernels; none without one."""
    directory = _directory()
    return [] if directory is None else sorted(path.parent.name for path in directory.glob("*/*.so"))


def load(name: str) -> dict[str, float]:
    """Load a library as FlashInfer does; its size. Raises OSError or RuntimeError if that fails."""
    import tvm_ffi  # comes with FlashInfer

    directory = _directory()
    assert directory is not None
    path = directory / name / f"{name}.so"
    tvm_ffi.load_module(str(path))
    return {"mib": path.stat().st_size / (1 << 20)}


def _directory() -> Path | None:
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
