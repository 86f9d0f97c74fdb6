"""Files for a machine without internet: wheels by what is there, kernels, a part of a model, a script."""

import argparse
import os
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from packaging.version import Version

from loadgen.experiments.gpu import aot, metadata, prepare
from loadgen.experiments.gpu.cut import cut_model
from loadgen.experiments.gpu.lease import Lease
from loadgen.offline.drive import Drive
from runtime.execution.flashinfer_kernels import Kernel


def wheel(directory, name, version, *needs):
    path = directory / f"{name}-{version}-py3-none-any.whl"
    text = f"Name: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {need}\n" for need in needs)
    with ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", text + "\nRequires-Dist: of-the-description\n")


def test_only_what_is_missing_is_taken(tmp_path, monkeypatch):
    elsewhere, wheels = tmp_path / "index", tmp_path / "wheels"
    elsewhere.mkdir()
    wheels.mkdir()
    wheel(elsewhere, "serving", "2.0", "arrays>=1", "old; python_version < '3.11'", "fast; extra == 'fast'", "small<3")
    wheel(elsewhere, "small", "2.5")
    wheel(wheels, "small", "3.1")
    wheel(elsewhere, "flash", "1.0", "nvidia-cutlass-dsl>=4", "arrays")
    calls = []

    def download(arguments):
        calls.append(arguments[-1])
        name = arguments[-1].split("=")[0].split("<")[0]
        (path,) = elsewhere.glob(f"{name}-*.whl")
        path.rename(wheels / path.name)

    monkeypatch.setattr(prepare, "pip", download)
    there = prepare.versions(["arrays==1.2", "Small_Thing", ""])
    assert there["small-thing"] is None

    def names():
        found = prepare.missing(["serving", "flash", "small-thing>9"], there, "3.12", wheels, [])
        return [path.name.split("-")[0] for path in found]

    assert names() == ["serving", "flash", "small"]
    assert calls == ["serving", "flash", "small<3"]
    assert names() == ["serving", "flash", "small"], "what is there is kept"
    assert len(calls) == 3
    with pytest.raises(ValueError, match=r"arrays>=1 is needed, and arrays 0\.9 is there"):
        list(prepare.missing(["serving"], {"arrays": Version("0.9")}, "3.12", wheels, []))


def test_kernels_are_compiled_once_and_found_by_flashinfer(tmp_path, monkeypatch, capsys):
    built = []

    class Spec:
        def __init__(self, name):
            self.name, self.jit_library_path = name, tmp_path / f"{name}.so"

        def build(self):
            built.append(self.name)
            self.jit_library_path.write_bytes(b"kernel")

    names = ("norm", "prefill", "sampling")
    monkeypatch.setattr(aot, "kernels", lambda: [Kernel(f"a {name}", lambda name=name: Spec(name)) for name in names])
    monkeypatch.setitem(sys.modules, "flashinfer.version", SimpleNamespace(__version__="0.6.99"))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["aot", str(tmp_path / "kernels"), *arguments])
        return aot.main()

    assert call("--only", "norm", "pre") == 0
    assert built == ["norm", "prefill"]
    assert call("--limit", "-1") == 3
    assert "over before 'a sampling'" in capsys.readouterr().out
    assert call() == 0
    assert built == list(names)
    monkeypatch.syspath_prepend(str(tmp_path / "kernels"))
    import flashinfer_jit_cache as cache

    assert cache.__version__.startswith("0.6.99")
    assert {path.parent.name: path.name for path in (tmp_path / "kernels").rglob("*.so")} == {
        n: f"{n}.so" for n in names
    }
    assert cache.get_jit_cache_dir() == str(tmp_path / "kernels" / aot.PACKAGE)


def test_a_part_of_a_model_is_a_model(tiny_dir, tmp_path):
    cut_model(tiny_dir, tmp_path / "part", 1, 300)
    drive = Drive(tmp_path / "part", device="cpu", dtype="float32", pool_tokens=256, kernels="torch")
    try:
        assert drive.core.executor.spec.num_layers == 1
        (tokens,) = drive.tokens([[5, 299, 7]], 4)
        assert max(tokens) < 300
    finally:
        drive.close()
    whole = sum(path.stat().st_size for path in tiny_dir.glob("*.safetensors"))
    assert (tmp_path / "part" / "model.safetensors").stat().st_size < whole / 3


def test_measure_installs_once_and_finds_what_lies_beside_it(tmp_path):
    out, checkout = tmp_path / "out", tmp_path / "checkout"
    (out / "wheels").mkdir(parents=True)
    checkout.mkdir()
    wheel(out / "wheels", "small", "1.0")
    (tmp_path / "kernels" / "cache").mkdir(parents=True)
    (tmp_path / "kernels" / "cache" / "norm.so").write_bytes(b"a kernel")
    prepare.pack_kernels(tmp_path / "kernels", out)
    prepare.write_script(out)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH|$*" >> "$LOG"\n')
    python.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "PYTHON": str(python), "LOG": str(tmp_path / "log")}
    variables["RAMET_SITE"] = str(tmp_path / "site")
    (tmp_path / "site").mkdir()
    for _ in range(2):
        subprocess.run([str(out / "measure"), "gpu", "--limit", "9"], cwd=checkout, env=variables, check=True)
    install, unpack, version, first, second = (tmp_path / "log").read_text().splitlines()
    assert install.endswith(f"--target {tmp_path / 'site'} {out}/wheels/small-1.0-py3-none-any.whl")
    path = f"{tmp_path / 'site'}:{checkout}"
    assert unpack.endswith(f"|-m tarfile -e {out}/kernels.tar.xz {tmp_path / 'site'}")
    assert version == f"{checkout}|-m loadgen.experiments.gpu.metadata {tmp_path / 'site'}"
    assert first == second == f"{path}|-m loadgen gpu --limit 9"


def test_the_compilers_find_all_headers(tmp_path, monkeypatch):
    """FlashInfer's norms include cuBLAS' headers, which neither this machine's CUDA nor the wheels have."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(prepare, "pip", lambda arguments: (tmp_path / "toolkit").mkdir())
    source = tmp_path / "norm.c"
    source.write_text("#include <cublasLt.h>\n#include <cublas_v2.h>\nint norm;\n")
    found = prepare.toolkit("13.0", tmp_path)
    compile_ = ["cc", "-c", str(source), "-o", os.devnull]
    subprocess.run(compile_, env={"PATH": os.environ["PATH"], "CPATH": found["CPATH"]}, check=True)


def test_kernels_and_a_version_are_installed_for_the_lease(tmp_path, monkeypatch):
    """A checkout that is not installed has no version, which a server needs."""
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nversion = "0.0.9"')
    monkeypatch.setattr(metadata, "_PROJECT", project)
    package = tmp_path / "kernels" / aot.PACKAGE
    (package / "__pycache__").mkdir(parents=True)
    (package / "__pycache__" / "x.pyc").touch()
    (package / "__init__.py").write_text("here = 1")
    (tmp_path / "wheels").mkdir()
    prepare.pack_kernels(tmp_path / "kernels", tmp_path)
    lease = Lease(tmp_path / "out", tmp_path / "work", time.monotonic() + 60)
    lease.out.mkdir()
    lease.work.mkdir()
    lease._install(tmp_path)
    version = (
        "from importlib.metadata import distributions as d; assert '0.0.9' in {x.version for x in d(name='ramet')}"
    )
    command = ["-c", f"import {aot.PACKAGE} as cache; assert cache.here; {version}"]
    assert lease._process(command, tmp_path / "none", 60, 60) == (0, "")
    with tarfile.open(tmp_path / "kernels.tar.xz") as packed:
        assert packed.getnames() == [f"{aot.PACKAGE}/__init__.py"]


def test_a_list_of_another_machines_packages(tmp_path, monkeypatch):
    has = tmp_path / "has.txt"
    has.write_text("numpy==2.5.2\nPyYAML\n")
    seen = {}

    def missing(wanted, there, python, wheels, target):
        seen.update(wanted=list(wanted), there=there, python=python, target=target)
        return iter(())

    monkeypatch.setattr(prepare, "missing", missing)
    given = argparse.Namespace(torch="2.11.0", has=has, flashinfer="0.6.18", glibc=28, python="3.12")
    prepare.collect(given, tmp_path / "wheels")
    assert seen["there"] == {"torch": Version("2.11.0"), "numpy": Version("2.5.2"), "pyyaml": None}
    assert "flashinfer-python==0.6.18" in seen["wanted"]
    assert any(line.startswith("aiohttp") for line in seen["wanted"]), "the server is measured by the load generator"
    assert "--platform=manylinux_2_28_x86_64" in seen["target"]
    assert "--platform=manylinux_2_29_x86_64" not in seen["target"]


@pytest.mark.parametrize(
    ("options", "words"),
    [("file", "File exists"), ("new --has nowhere", "No such file"), ("new --torch rubbish", "Invalid version")],
)
def test_what_cannot_be_prepared_is_said_in_a_line(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setattr(sys, "argv", ["prepare", *options.split(), "--kernels"])
    assert prepare.main() == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
