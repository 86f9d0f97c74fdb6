"""`make serve` with stand-ins for an NVIDIA driver, for pip and for the server: what is asked for, and what is said."""

import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runtime.execution.flashinfer_package import VERSION

ROOT = Path(__file__).parents[1]
# `bin/python` of the virtual environment: pip keeps what it was asked for, and fails for what FAILS matches.
PYTHON = f"""#!/bin/sh
case "$*" in
  *"-m pip show"*) ;;
  *"-m pip install"* | *"-m flashinfer"*)
    echo "$*" >> "$ASKED"
    for last; do :; done
    test -f "$last" && last=$(tail -n 1 "$last")
    case "$last" in $FAILS)
      echo "WARNING: retrying" >&2
      echo "ERROR: No matching distribution found for $last" >&2
      exit 1
    esac ;;
  *urlopen*) ;;
  *torch.version.cuda*) exit $CPU_TORCH ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
KERNELS = "-m flashinfer install-jit-cache-wheel"


class Made:
    """A run of `make serve` in an empty environment."""

    def __init__(self, tmp_path: Path, driver: bool = True, again: bool = False, **settings: str):
        home, tools = tmp_path / "venv", tmp_path / "tools"
        for directory in (home / "bin", tools):
            directory.mkdir(parents=True, exist_ok=True)
        write(home / "bin/python", PYTHON)
        write(home / "bin/ramet", '#!/bin/sh\necho "serves: $*"\n')
        if driver:
            write(tools / "nvidia-smi", "#!/bin/sh\n")
        self.log = tmp_path / "asked"
        self.log.write_text("")
        defaults = {"FAILS": "nothing", "CPU_TORCH": "0", "ASKED": str(self.log)}
        # Within `make test`, these variables make another make talk of its folders.
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "serve", f"VENV={home}", "ARGS=--port 1"]
        if not driver:
            command.append("NVIDIA=")
        found = subprocess.run(
            command,
            cwd=ROOT, env={**outer, "PATH": f"{tools}:{os.environ['PATH']}", **defaults, **settings},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        self.code, self.output = found.returncode, found.stdout + found.stderr
        self.installed = [line.split("--progress-bar on ")[-1] for line in self.log.read_text().splitlines()]

    @property
    def serves(self) -> bool:
        return self.code == 0 and self.output.rstrip().endswith("serves: serve --port 1")


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_with_a_driver_flashinfer_and_its_compiled_kernels_are_installed(tmp_path):
    made = Made(tmp_path)
    assert made.serves, made.output
    assert made.installed[0] == "torch==2.13.0", "from PyPI, with CUDA"
    assert made.installed[-2:] == [f"--requirement {tmp_path}/venv/cuda.txt", KERNELS]
    assert (tmp_path / "venv/cuda.txt").read_text().splitlines()[-1] == PIN
    assert "no FlashInfer" not in made.output
    assert Made(tmp_path).installed == [], "once"


def test_without_a_driver_nothing_of_it_is_installed(tmp_path):
    made = Made(tmp_path, driver=False)
    assert made.serves, made.output
    assert not [line for line in made.installed if "flashinfer" in line or "cuda.txt" in line]
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0" in made.installed[0]


PIN = f"flashinfer-python=={VERSION}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FAILS": "flashinfer-python*"}, rf"==> no FlashInfer: ERROR: No matching .* {PIN}; torch computes attention"),
        ({"CPU_TORCH": "1"}, r"==> no FlashInfer: ERROR: this torch is built for CPUs; .*; torch computes attention"),
        (
            {"FAILS": "install-jit-cache-wheel"},
            r"==> no compiled kernels: ERROR: .*; the first start compiles with nvcc",
        ),
    ],
)
def test_what_cannot_be_installed_is_said_on_one_line_and_the_server_starts(tmp_path, settings, said):
    made = Made(tmp_path, **settings)
    assert made.serves, made.output
    assert len(re.findall(said, made.output)) == 1, made.output
    assert "no FlashInfer" not in made.output or "attention. `make extra-cuda` tries again\n" in made.output


def test_one_version_of_flashinfer_is_named_everywhere():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["cuda"] == [PIN]
    files = ("docker/Dockerfile", "loadgen/experiments/gpu/prepare.py", "runtime/execution/README.md")
    named = {name: re.findall(r"0\.[67]\.\d+(?:\.post\d+)?\b", (ROOT / name).read_text()) for name in files}
    assert set().union(*named.values()) == {VERSION}, named
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    assert f"ARG FLASHINFER=flashinfer-python=={VERSION}\n" in dockerfile
    assert f"ARG FLASHINFER_JIT_CACHE=flashinfer-jit-cache=={VERSION}\n" in dockerfile
