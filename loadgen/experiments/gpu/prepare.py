"""`python -m loadgen.experiments.gpu.prepare DIRECTORY`: all that a GPU machine without internet needs.

Wheels of the packages that it lacks, FlashInfer's kernels compiled for it, a part of the default model with its
tokenizer, and `measure`, which installs them there and runs a bench. The same command continues an interrupted run. No
GPU is needed here.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from loadgen.experiments.gpu.cut import cut_model
from runtime.config import make_config
from runtime.errors import RametError
from runtime.models.resolve import resolve_model

_ROOT = Path(__file__).parents[3]
# Dependencies of FlashInfer that Ramet's calls do not use: 1 GB.
_UNUSED = frozenset({"cuda-python", "cuda-tile", "nccl4py", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"})
_COMPILERS = tuple(f"flashinfer/data/{library}/" for library in ("cutlass", "cccl", "spdlog"))
# The compiler, and headers that FlashInfer's sources include.
_TOOLKIT = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_CURAND = "nvidia-curand>=10.4,<11"
# Headers of cuBLAS that the norms' sources include and do not use.
_UNCALLED = ("cublasLt.h", "cublas_v2.h")

_MEASURE = """#!/bin/sh
# In a checkout of Ramet, on the machine with the GPU: installs what lies beside this file for $PYTHON (python3), apart
# from its own packages, and runs a bench: measure gpu --limit 400
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=${RAMET_SITE:-/tmp/ramet-site}
if ! [ -e "$site/.complete" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \\
        "$here"/wheels/*.whl
    [ ! -e "$here/kernels.tar.xz" ] || "$python" -m tarfile -e "$here/kernels.tar.xz" "$site"
    PYTHONPATH="$PWD" "$python" -m loadgen.experiments.gpu.metadata "$site"
    touch "$site/.complete"
fi
export PYTHONPATH="$site:$PWD"
# FlashInfer came without its sources. It names a kernel that is missing.
export FLASHINFER_DISABLE_JIT=1
exec "$python" -m loadgen "$@"
"""


def main() -> int:
    """Prepare the directory. Returns 1 after a failure, 3 if `--limit` was reached before the last kernel."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.experiments.gpu.prepare", description=__doc__)
    parser.add_argument("directory", type=Path)
    there = parser.add_argument_group("the other machine")
    there.add_argument("--python", default="3.12", help="its Python (default: 3.12)")
    there.add_argument("--torch", default="2.11.0", help="its torch (default: 2.11.0); no wheel of it is taken along")
    there.add_argument("--has", type=Path, metavar="FILE", help="what else it has, as of `pip list --format=freeze`")
    there.add_argument("--glibc", type=int, default=34, help="its glibc is 2.N at least (default: 34)")
    there.add_argument("--arch", default="9.0a", help="compute capability of its GPU (default: 9.0a, Hopper)")
    parser.add_argument("--cuda", default="13.0", help="version of the compiler, where this machine has none")
    parser.add_argument("--flashinfer", default="0.6.18.post1", help="default: 0.6.18.post1")
    parser.add_argument(
        "--kernels", nargs="*", default=[""], metavar="NAME", help="only those with this in their name; without: none"
    )
    parser.add_argument("--layers", type=int, default=1, help="of the default model (default: 1); 0: no model")
    parser.add_argument("--vocabulary", type=int, default=4096, help="of its tokens (default: 4096)")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no kernel is begun")
    arguments = parser.parse_args()
    if arguments.layers < 0 or arguments.vocabulary < 1:
        parser.error("--layers is at least 0, --vocabulary at least 1")
    try:
        return prepare(arguments, arguments.directory.resolve())
    except (OSError, ValueError, RametError) as error:
        print(f"prepare: {error}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        # The program has said why; the same command goes on from there.
        print(f"prepare: {error.cmd[-1]}: exit status {error.returncode} of {Path(error.cmd[0]).name}", file=sys.stderr)
    return 1


def prepare(arguments: argparse.Namespace, out: Path) -> int:
    """Fill `out`; returns the exit code. Raises OSError, ValueError, RametError, CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    collect(arguments, out / "wheels")
    carry_model(arguments, out)
    write_script(out)
    code = compile_kernels(arguments, out) if arguments.kernels else 0
    print_sizes(out)
    return code


def collect(arguments: argparse.Namespace, wheels: Path) -> None:
    """Download the wheels of Ramet, of its benches and of FlashInfer that the other machine lacks."""
    wheels.mkdir(exist_ok=True)
    lines = [f"torch=={arguments.torch}"]
    if arguments.has is not None:
        lines += arguments.has.read_text(encoding="utf-8").split()
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["load"], *extras["bench"], f"flashinfer-python=={arguments.flashinfer}"]
    tags = [f"--platform=manylinux_2_{n}_x86_64" for n in range(arguments.glibc, 4, -1)]
    tags += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    target = ["--implementation=cp", f"--python-version={arguments.python}", *tags]
    for wheel in missing(wanted, versions(lines), arguments.python, wheels, target):
        if wheel.name.startswith("flashinfer_python-"):
            _leave_sources(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / (1 << 20):.1f} MiB", flush=True)


def _leave_sources(wheel: Path) -> None:
    """Rewrite FlashInfer's wheel without the files that only its compiler reads, which are half of it."""
    half = wheel.with_suffix(".part")
    with ZipFile(wheel) as whole, ZipFile(half, "w", ZIP_DEFLATED, compresslevel=9) as rest:
        for entry in whole.infolist():
            if not entry.filename.startswith(_COMPILERS):
                rest.writestr(entry, whole.read(entry), ZIP_DEFLATED, 9)
    half.rename(wheel)


def versions(lines: Iterable[str]) -> dict[str, Version | None]:
    """Versions by name, of lines such as `numpy==2.1` or `numpy`."""
    found: dict[str, Version | None] = {}
    for line in lines:
        name, _, version = line.strip().rstrip(",").partition("==")
        found[canonicalize_name(name)] = Version(version) if version else None
    return found


def missing(
    wanted: Iterable[str], there: dict[str, Version | None], python: str, wheels: Path, target: list[str]
) -> Iterator[Path]:
    """Download wheels of requirements and their dependencies that are not `there`; wheels in `wheels` are kept.

    Raises ValueError if requirements exclude each other's versions.
    """
    environment = {
        "python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "os_name": "posix",
        "platform_system": "Linux", "platform_machine": "x86_64", "platform_python_implementation": "CPython",
        "implementation_name": "cpython", "extra": "",
    }  # fmt: skip
    queue, there = [Requirement(line) for line in wanted], dict(there)
    for requirement in queue:
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if not applies or name in ("ramet", *_UNUSED) or (name in there and there[name] is None):
            continue
        if name in there:
            if requirement.specifier.contains(str(there[name]), prereleases=True):
                continue
            raise ValueError(f"{requirement} is needed, and {name} {there[name]} is there")
        wheel = _kept(requirement, wheels) or _download(requirement, wheels, target)
        there[name] = parse_wheel_filename(wheel.name)[1]
        queue += _requirements(wheel)
        yield wheel


def _kept(requirement: Requirement, wheels: Path) -> Path | None:
    for wheel in wheels.glob("*.whl"):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if name == canonicalize_name(requirement.name) and requirement.specifier.contains(version, prereleases=True):
            return wheel
    return None


def _download(requirement: Requirement, wheels: Path, target: list[str]) -> Path:
    before = set(wheels.glob("*.whl"))
    pip(["download", "--no-deps", "--only-binary=:all:", *target, "-d", str(wheels), _plain(requirement)])
    (wheel,) = set(wheels.glob("*.whl")) - before
    return wheel


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _requirements(wheel: Path) -> Iterator[Requirement]:
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        text = archive.read(metadata).decode()
    for line in text.partition("\n\n")[0].splitlines():
        if line.startswith("Requires-Dist: "):
            yield Requirement(line.removeprefix("Requires-Dist: "))


def pip(arguments: list[str]) -> None:
    """Call pip. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def write_script(out: Path) -> None:
    """Write `measure`."""
    (out / "measure").write_text(_MEASURE, encoding="utf-8")
    (out / "measure").chmod(0o755)


def carry_model(arguments: argparse.Namespace, out: Path) -> None:
    """Write a part of the default model to `model`, and the tokenizer, which models of random weights need, too."""
    if not arguments.layers or (out / "model" / "tokenizer.json").exists():
        return
    source = resolve_model(make_config().model)
    cut_model(source, out / "model", arguments.layers, arguments.vocabulary)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        shutil.copy(source / name, out / "model" / name)


def compile_kernels(arguments: argparse.Namespace, out: Path) -> int:
    """Compile FlashInfer's kernels for the other machine's GPU; returns the exit code of `aot`."""
    site = out / "build" / "site"
    site.mkdir(parents=True, exist_ok=True)
    # FlashInfer runs here, too, to describe its kernels: for this Python, beside the torch of this environment.
    here = versions(f"{one.metadata['Name']}=={one.version}" for one in distributions())
    for name in ("flashinfer-python", "apache-tvm-ffi"):  # of the version that is asked for, in any case
        here.pop(name, None)
    wheels = out / "build" / "wheels"
    wheels.mkdir(exist_ok=True)
    wanted = [f"flashinfer-python=={arguments.flashinfer}", "filelock", "ninja"]
    found = list(missing(wanted, here, "{}.{}".format(*sys.version_info), wheels, []))
    if not (site / ".complete").exists():
        pip(["install", "--no-deps", "--upgrade", "--target", str(site), *map(str, found)])
        (site / ".complete").touch()
    environment = {
        **os.environ, **toolkit(arguments.cuda, out / "build"), "FLASHINFER_CUDA_ARCH_LIST": arguments.arch,
        "FLASHINFER_WORKSPACE_BASE": str(out / "build"), "FLASHINFER_USE_CUDA_NORM": "1",
        "PYTHONPATH": os.pathsep.join([str(site), str(_ROOT)]), "PATH": f"{site / 'bin'}:{os.environ['PATH']}",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)),
    }  # fmt: skip
    kernels = out / "build" / "kernels"
    command = [sys.executable, "-m", "loadgen.experiments.gpu.aot", str(kernels), "--limit", str(arguments.limit)]
    code = subprocess.run([*command, "--only", *arguments.kernels], env=environment, check=False).returncode
    pack_kernels(kernels, out)
    return code


def pack_kernels(kernels: Path, out: Path) -> None:
    """Write `kernels.tar.xz`, half as large as the kernels."""
    with tarfile.open(out / "kernels.part", "w:xz") as packed:
        for path in sorted(kernels.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                packed.add(path, path.relative_to(kernels))
    (out / "kernels.part").rename(out / "kernels.tar.xz")


def toolkit(version: str, build: Path) -> dict[str, str]:
    """Variables for the compilers: this machine's CUDA of that version, or one from wheels.

    The linker needs a libcuda, which comes with a driver. A library without symbols replaces it.
    """
    stubs, wheels = build / "stubs", build / "toolkit"
    stubs.mkdir(exist_ok=True)
    link = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stubs / "libcuda.so"), "-x", "c", os.devnull]
    subprocess.run(link, check=True)
    home = Path(os.environ.get("CUDA_HOME", f"/usr/local/cuda-{version}"))
    headers, packages = build / "headers", [_CURAND]
    headers.mkdir(exist_ok=True)
    for name in _UNCALLED:
        (headers / name).touch()
    if not (home / "bin" / "nvcc").exists():
        home, packages = wheels / "nvidia" / "cu13", [*(f"{name}=={version}.*" for name in _TOOLKIT), *packages]
    if not (wheels / ".complete").exists():
        pip(["install", "--no-deps", "--upgrade", "--target", str(wheels), *packages])
        for link_name, library in (("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")):
            if len(packages) > 1 and not (home / link_name).exists():
                (home / link_name).symlink_to(library)
        (wheels / ".complete").touch()
    return {
        "CUDA_HOME": str(home), "CPATH": os.pathsep.join([str(wheels / "nvidia" / "cu13" / "include"), str(headers)]),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stubs}",
    }  # fmt: skip


def print_sizes(out: Path) -> None:
    """Print the sizes of the files to copy, and the command for the other machine."""
    total = 0.0
    for part in ("wheels", "kernels.tar.xz", "model"):
        path = out / part
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        size = sum(path.stat().st_size for path in files) / (1 << 20)
        total += size
        print(f"{part}: {len(files)} files, {size:.1f} MiB")
    print(f"together {total:.1f} MiB, without build/, which stays. There, in a checkout of Ramet:")
    print("    python3 -m loadgen.experiments.gpu.lease OUT --carried DIRECTORY --seconds 570")


if __name__ == "__main__":
    raise SystemExit(main())
