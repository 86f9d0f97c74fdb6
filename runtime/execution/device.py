"""Choice of device, dtype, attention backend and overlap from the options."""

import errno
import logging
from functools import cache
from pathlib import Path

import torch

from runtime.config import MOST_RUNNING, Config, ModelConfig
from runtime.errors import ModelError

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# FlashInfer merges partial results of heads of these sizes.
_HEAD_DIMS = (64, 128, 256)
_DRIVER = Path("/proc/driver/nvidia")


def choose_device(config: ModelConfig) -> torch.device:
    """The device of `--device`. Raises ModelError if it does not exist."""
    if config.device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if _DRIVER.exists():
            _warn_of_driver()
        return torch.device("cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError:
        raise ModelError(f"--device is {config.device!r}; supported: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"--device is {config.device!r}; supported: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"--device is {config.device!r}, but torch finds no CUDA device")
    return device


@cache
def _warn_of_driver() -> None:
    try:
        torch.cuda.init()
        why = "it has no device for this process"
    except (RuntimeError, AssertionError) as error:  # such as a driver too old for it
        why = str(error).splitlines()[0]
    log.warning("--device auto: the CPU computes; there is an NVIDIA driver, but torch cannot use it: %s", why)


def set_current(device: torch.device) -> None:
    """Make a GPU the current one of this thread: FlashInfer launches its kernels there, wherever the tensors are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def choose_dtype(config: ModelConfig, device: torch.device, native: bool) -> torch.dtype:
    """The dtype of `--dtype`; auto is bfloat16 unless torch would have to emulate it.

    On processors without bfloat16 products, the native kernels read bfloat16 and compute in float32. This halves the
    memory traffic.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.bfloat16 if native or device.type == "cuda" or _cpu_multiplies_bfloat16() else torch.float32


def wants_native(config: Config, device: torch.device) -> bool:
    """Whether the native kernels are to compute the layers, if Ramet's own code computes the model."""
    torch_only = config.model.kernels == "torch" or config.model.tensor_parallel > 1 or config.cache.kv_dtype == "fp8"
    return device.type == "cpu" and not torch_only


def choose_attention(config: ModelConfig, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The backend of `--kernels`; auto is FlashInfer on CUDA, unless `flashinfer_unfit` says why not."""
    unfit = flashinfer_unfit(device, dtype, head_dim)
    if config.kernels == "flashinfer":
        if unfit is not None:
            raise ModelError(f"--kernels flashinfer: {unfit}")
        return "flashinfer"
    return "flashinfer" if config.kernels == "auto" and unfit is None else "torch"


def flashinfer_unfit(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer cannot compute a model on a device; None: nothing is known before it is tried."""
    if device.type != "cuda":
        return f"FlashInfer needs CUDA; the device is {device}"
    from runtime.execution.flashinfer_package import flashinfer_fault

    if (fault := flashinfer_fault()) is not None:
        return fault
    if dtype == torch.float32:
        return "FlashInfer has no float32; take --dtype bfloat16"
    return None if head_dim in _HEAD_DIMS else f"FlashInfer has heads of 64, 128 or 256; the model's have {head_dim}"


def step_tokens(device: torch.device) -> int:
    """Default for the largest number of rows in a step.

    On a CPU, 256 rows are nearly as efficient as more rows, and decoding requests wait less for prompts.
    """
    return 2048 if device.type == "cuda" else 256


def most_running(device: torch.device) -> int:
    """Default for the most running requests."""
    return MOST_RUNNING if device.type == "cuda" else 64


def choose_overlap(config: Config, device: torch.device) -> bool:
    """Whether a decode step is launched before the tokens of the previous step are read; auto: on CUDA with one rank.

    A CPU gains nothing, because launching a step computes it. Raises ModelError for `on` with several ranks, which
    receive tokens from the host.
    """
    several = config.model.tensor_parallel > 1
    if config.engine.overlap == "on" and several:
        raise ModelError("--overlap on: steps overlap only within one process, not with --tensor-parallel")
    return config.engine.overlap == "on" or (config.engine.overlap == "auto" and device.type == "cuda" and not several)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a computation ran out of memory, so that a smaller one may succeed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    # Of the allocator of a CPU, of mapped files, of pinned memory, and of cuBLAS.
    said = (
        "can't allocate memory",
        "Cannot allocate memory",
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return any(text in str(error) for text in said)


def is_lost(device: torch.device) -> bool:
    """Whether a failed kernel has made the GPU unusable for this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _cpu_multiplies_bfloat16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(cpuinfo.read_text().split()))
