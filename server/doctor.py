"""`ramet doctor`: this machine's hardware and packages, and what would make Ramet faster."""

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.config import Config, ModelConfig, default_cache_dir
from runtime.errors import ModelError
from runtime.execution.flashinfer_package import COST, VERSION, flashinfer_fault
from runtime.models.gguf_tensors import read_gguf
from runtime.models.implementation import own_spec
from runtime.models.resolve import check_name
from runtime.models.spec import DecoderSpec
from server.commands.models import found_models, free_memory

_GIB = 1 << 30
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16")
# The flag that shows that a processor supports the kernels for an instruction set.
_FLAG_OF = {
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "avx512": "avx512vl",
    "avx2": "avx2",
    "neonbf16": "bf16",
    "neon": "asimddp",
}
# The same flags by their names in macOS.
_SYSCTLS = {f"hw.optional.arm.FEAT_{name}": flag for name, flag in (("DotProd", "asimddp"), ("BF16", "bf16"))}
# The suffix of a converted model's directory has the conversion's digest and version.
_VERSION = r"(-[0-9a-f]{12}(-link)?)?(-\d+)?$"
_PACKAGES = (
    "ramet",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "fastapi",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "redis",
)


def print_report(config: Config) -> None:
    """Print a table about this machine, and hints. Raises ModelError behind them if the model cannot be served."""
    tokens, fault = None, None
    try:
        tokens = _pool_tokens(config)
    except ModelError as error:
        fault = error
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for name, value in _facts(config, tokens):
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    hints = list(_hints(config))
    console.print("\n[bold]What would be faster, or is missing[/bold]" if hints else "\nNothing is missing.")
    for hint in hints:
        console.print(f"- {hint}", soft_wrap=True)
    if fault is not None:
        raise fault


def _facts(config: Config, tokens: int | None) -> Iterator[tuple[str, str]]:
    from runtime.execution.native.library import load_best
    from runtime.execution.sizing import main_memory

    name, flags = _processor()
    library = load_best()
    yield "processor", name
    yield "cores", f"{_cores()} of {os.cpu_count()} may be used"
    yield "instructions", ", ".join(flag for flag in _FLAGS if flag in flags) or "none that the kernels use"
    yield "kernels", f"native, for {library.isa}" if library else "none: torch computes"
    yield "4 and 8 bits", "GGUF, AWQ, GPTQ, --quantization int4 and int8" if library else "unpacked: torch computes"
    yield "GPU", _gpu()
    if _gpu() != "none":
        yield "attention", _attention(config.model)
    yield "memory", f"{main_memory() / _GIB:.1f} GiB, {free_memory() / _GIB:.1f} of it free"
    size = f"{config.cache.pool_memory or 1:g} GiB (--pool-memory)" + (f": {tokens:,} tokens" if tokens else "")
    yield "pool", size if config.cache.pool_tokens is None else f"{config.cache.pool_tokens:,} tokens (--pool-tokens)"
    where = default_cache_dir()
    yield "disk", f"{shutil.disk_usage(_existing(where)).free / _GIB:.1f} GiB free at {where}"
    yield "model", f"{config.model.model}: {_is_there(config)}"
    if (path := Path(config.model.model).expanduser()).is_file():
        keeps = library is not None and config.model.quantization == config.model.dtype == "auto"
        yield "weights", f"{path.stat().st_size / _GIB:.1f} GiB: {_weights(path, keeps)}"
    there = {re.sub(_VERSION, "", path.name) for path in where.glob("models/[!.]*") if path.is_dir()}
    others = [f"{name} ({size / _GIB:.1f} GiB)" for name, size in found_models()]
    yield "models there", ", ".join([*sorted(there), *others]) or "none"
    yield "compiler", _compiler() or "none"
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.release()}"
    yield "packages", ", ".join(f"{package} {found}" for package in _PACKAGES if (found := _version(package)))


def _pool_tokens(config: Config) -> int | None:
    """Tokens that the pool will hold; None: this is not known before the model is fetched or loaded.

    Raises ModelError if the model cannot be served.
    """
    from runtime.execution.sizing import pool_tokens

    spec = _spec(config.model)
    return None if spec is None else pool_tokens(config, spec)


def _spec(config: ModelConfig) -> DecoderSpec | None:
    """The spec of a model that needs no fetching and no code of transformers. Raises ModelError."""
    from runtime.models.gguf import write_config

    check_name(config.model)
    path = Path(config.model).expanduser()
    if path.is_file():
        with TemporaryDirectory() as directory:
            write_config(path, *_read_gguf(path), Path(directory))
            return own_spec(config, Path(directory))
    if path.is_dir():
        return own_spec(config, path)
    fetched = next(default_cache_dir().glob(f"models/{config.model}-*"), None)
    return None if fetched is None else own_spec(config, fetched)


@cache
def _read_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    return read_gguf(path)  # takes seconds


def _hints(config: Config) -> Iterator[str]:
    from runtime.execution.native.library import ISAS, load_best

    library, (_, flags) = load_best(), _processor()
    best = next((isa for isa in ISAS if _FLAG_OF[isa] in flags), None)
    if best is not None and best != (library and library.isa):
        why = f"but {found} did not build them" if (found := _compiler()) else "and a C++20 compiler builds them"
        yield f"Kernels for {best} are missing, {why}. `pip install -v --editable .` builds again and shows errors."
    if library is not None and not Path(config.model.model).expanduser().is_file():
        yield "A GGUF file of 4 bits, or --quantization int8, makes decode steps read fewer bytes of weights."
    if "avx2" in flags and "avx512_vnni" not in flags:
        yield "A processor with products of bytes (AVX512-VNNI) computes weights of 4 to 8 bits faster."
    if "avx512f" in flags and "avx512_bf16" not in flags:
        yield "A processor with bfloat16 products (AVX512-BF16) computes prompts faster."
    if _cores() < (os.cpu_count() or 1):
        yield "This process may not use all cores (affinity or a container's limit)."
    wanted = _gpu() != "none" and config.model.kernels != "torch"
    if wanted and (fault := flashinfer_fault()):
        yield f"{fault}, or `pip install flashinfer-python=={VERSION}`. Without it, {COST}."
    elif wanted and not (_version("flashinfer-jit-cache") or shutil.which("nvcc")):
        yield f"FlashInfer has neither compiled kernels (`make extra-cuda`) nor nvcc. Without it, {COST}."
    if free_memory() < 2 * _GIB:
        yield "Little memory is free: lower --pool-memory."


def _compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _processor() -> tuple[str, frozenset[str]]:
    """The processor's name, and its instruction-set flags."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return _processor_of_macos()
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return name[1] if name else platform.machine(), frozenset(flags[1].split() if flags else ())


def _processor_of_macos() -> tuple[str, frozenset[str]]:
    names = ("machdep.cpu.brand_string", *_SYSCTLS)
    try:
        told = subprocess.run(["sysctl", *names], capture_output=True, text=True, check=False).stdout
    except OSError:
        return platform.machine(), frozenset()
    values = dict(re.findall(r"^(\S+): (.*)$", told, re.MULTILINE))
    flags = (flag for name, flag in _SYSCTLS.items() if values.get(name) == "1")
    return values.get(names[0], platform.machine()), frozenset(flags)


def _gpu() -> str:
    if not Path("/proc/driver/nvidia").exists():
        return "none"
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a driver, but torch finds no device"


def _attention(config: ModelConfig) -> str:
    """What will compute attention on the GPU, unless FlashInfer fails its trial at the start."""
    if config.kernels == "torch":
        return "torch (--kernels torch)"
    if fault := flashinfer_fault():
        return f"torch: {fault}"
    if compiled := _version("flashinfer-jit-cache"):
        return f"flashinfer {VERSION}, compiled ({compiled})"
    if nvcc := shutil.which("nvcc"):
        return f"flashinfer {VERSION}, compiled at a model's first start with {nvcc}"
    return f"torch: FlashInfer {VERSION} has neither compiled kernels nor nvcc"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _is_there(config: Config) -> str:
    """Where `--model` comes from."""
    name = config.model.model
    if Path(name).expanduser().exists():
        return "a file or directory of this machine"
    if any(default_cache_dir().glob(f"models/{name}-*")):
        return "there"
    try:
        check_name(name)
    except ModelError:
        return "not found"
    return "fetched at the first start"


def _weights(path: Path, keeps: bool) -> str:
    """How the matrices of a GGUF file are computed, by type. `keeps`: as stored where the kernels know the type."""
    from runtime.models.ggml import can_decode
    from runtime.models.gguf_hybrid import GRANITE

    try:
        metadata, tensors = _read_gguf(path)
    except ModelError as error:
        return str(error)
    kinds = Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1)
    keeps = keeps and metadata.get("general.architecture") != GRANITE
    ways: dict[str, list[str]] = {}
    for kind, count in kinds.most_common():
        way = "computed as stored" if keeps and can_decode(kind) else "unpacked to --dtype"
        ways.setdefault(way, []).append(f"{count} {kind}")
    return "; ".join(f"{', '.join(found)}: {way}" for way, found in ways.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
