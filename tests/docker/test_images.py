"""The Dockerfile: it copies files that exist and that the build may see, and the pins fit the distribution."""

import fnmatch
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import zip_longest
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
# Every stage by its name, from its FROM to the next one.
STAGES = {
    re.match(r"FROM \S+ AS (\w+)", text)[1]: re.sub(r"\\\n", " ", text)
    for text in re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]
}


def instructions(text: str, keyword: str) -> list[str]:
    return [line.removeprefix(keyword).strip() for line in text.splitlines() if line.startswith(f"{keyword} ")]


def image(target: str) -> str:
    """The stages of which an image consists, down to the base image."""
    text = STAGES[target]
    below = instructions(text, "FROM")[0].split()[0]
    return (image(below) if below in STAGES else "") + text


def copied() -> set[str]:
    """The paths of the repository that are copied into a stage."""
    lines = [line.split() for line in instructions("\n".join(STAGES.values()), "COPY") if "--from=" not in line]
    return {source for line in lines for source in line[:-1] if not source.startswith("--")}


def test_stages_are_those_that_are_used():
    assert list(STAGES)[-1] == "cpu", "the last one is what `docker build` makes"
    assert STAGES.keys() >= {"cuda", "router"}
    used = [found for text in STAGES.values() for found in re.findall(r"^(?:COPY|RUN) .*[-,]from=(\w+)", text, re.M)]
    below = [instructions(text, "FROM")[0].split()[0] for text in STAGES.values()]
    assert {*used, *below, "cpu", "cuda", "router"} == STAGES.keys() | {"${BASE_IMAGE}"}


@pytest.mark.parametrize("target", ["cpu", "cuda", "router"])
def test_an_image(target):
    text = image(target)
    assert re.fullmatch(r"\d+:\d+", instructions(text, "USER")[-1])
    assert instructions(text, "ENTRYPOINT")[-1].startswith("[")
    assert len(instructions(text, "HEALTHCHECK")) == 1
    assert "g++" not in text
    assert "--device" not in instructions(image("cpu"), "ENTRYPOINT")[-1]


def test_the_wheel_is_built_where_the_kernels_are():
    """An image without the native kernels would start, and compute several times slower."""
    sources = re.search(r"ls build/lib\.\*/(\S+)/_avx512bf16", STAGES["wheel"])[1]
    assert (ROOT / sources / "src/avx512bf16.cpp").exists()


def test_what_is_copied_exists_and_may_be_seen():
    assert copied()
    assert all((ROOT / source).exists() for source in copied())


def test_the_build_sees_nothing_but_what_is_copied():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied()
    # Secrets lie beside the Dockerfile.
    assert not any(fnmatch.fnmatch("docker/secrets", line[1:]) for line in lines if line.startswith("!"))


def listed(*asked: str) -> list[str]:
    """The lines of docker/requirements.py."""
    command = [sys.executable, "docker/requirements.py", *asked]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def pins(*asked: str) -> dict[str, str]:
    """Versions by names, of lines for `pip install --require-hashes`; each has hashes."""
    text = "\n".join(listed("--pinned", *asked))
    found = re.findall(r"^([a-z0-9-]+)==([^\s;]+).*\\\n((?: .*\n?)+)", text, re.MULTILINE)
    assert len(found) == len([line for line in text.splitlines() if not line.startswith(" ")])
    for name, _, below in found:
        lines = below.rstrip().splitlines()
        hashes = [line for line in lines if re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)]
        assert hashes, name
        assert len(hashes) == len([line for line in lines if not line.startswith("    #")]), name
        # A line goes on as far as there are hashes.
        assert [line.endswith("\\") for line in hashes] == [True] * (len(hashes) - 1) + [False], name
    return {name: version for name, version, _ in found}


@pytest.mark.parametrize("asked", [(), ("load",), ("bench", "otel"), ("load", "tiers", "ray"), ("build",), ("router",)])
def test_every_dependency_is_pinned_within_its_range(asked):
    found = pins(*asked)
    for requirement in map(Requirement, listed(*asked)):
        if requirement.name != "torch":
            assert requirement.specifier.contains(found[requirement.name], prereleases=True), requirement


def test_what_dependencies_need_is_pinned_with_them():
    found = {asked: pins(asked).keys() for asked in ("load", "bench", "otel", "build", "router")}
    assert pins().keys() >= {"starlette", "pydantic-core", "hf-xet"}
    assert pins().keys() >= {"sympy", "networkx"}, "torch's own, which comes without its dependencies"
    assert "torch" not in pins()
    assert found["load"] - pins().keys() >= {"aiosignal", "yarl"}
    assert found["bench"] - found["load"] >= {"contourpy", "fonttools"}
    assert found["otel"] - pins().keys() >= {"googleapis-common-protos", "protobuf"}
    assert found["build"] == {"setuptools"}
    assert found["router"] >= {"sglang-router", "orjson", "aiosignal"}
    assert not found["router"] & {"numpy", "transformers"}


def test_the_pins_have_hashes_of_files_that_an_image_can_install(tmp_path):
    """Source distributions, and wheels for Python 3.11 and 3.12 on glibc's Linux on x86_64 and ARM."""
    taken = [
        "a-1.tar.gz",
        "a-1-py3-none-any.whl",
        "a-1-py2.py3-none-any.whl",
        "a-1-cp37-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        "a-1-1-cp311-cp311-manylinux_2_28_aarch64.whl",
        "a-1-cp312-cp312-linux_x86_64.whl",
        "a-1-cp311-none-any.whl",
    ]
    left = [
        "a-1-py2-none-any.whl",
        "a-1-py3-none-win_amd64.whl",
        "a-1-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a-1-cp311-cp311-musllinux_1_2_x86_64.whl",
        "a-1-cp311-cp311-manylinux_2_28_ppc64le.whl",
        "a-1-cp312-cp312-macosx_11_0_arm64.whl",
        "a-1-cp313-abi3-manylinux_2_28_x86_64.whl",
        "a-1-cp313-cp313t-manylinux_2_28_x86_64.whl",
    ]
    # Between files that are taken lie others. A package that no image can install keeps its hashes.
    files = [file for pair in zip_longest(left, taken) for file in pair if file]
    hashes = {file: hashlib.sha256(file.encode()).hexdigest() for file in [*files, "b-1-cp311-cp311-win32.whl"]}

    def pin(name: str, files: list[str]) -> str:
        lines = " \\\n".join(f"    --hash=sha256:{hashes[file]}" for file in files)
        return f"{name}==1 \\\n{lines}\n    # via ramet\n"

    def package(files: list[str]) -> str:
        wheels = ", ".join(
            f"{{ url = 'x:/{file}', hashes = {{ sha256 = '{hashes[file]}' }} }}"
            for file in files
            if file != "a-1.tar.gz"
        )
        return f"[[packages]]\nwheels = [{wheels}]\n"

    other = ["b-1-cp311-cp311-win32.whl"]
    source = f"sdist = {{ url = 'x:/a-1.tar.gz', hashes = {{ sha256 = '{hashes['a-1.tar.gz']}' }} }}\n"
    (tmp_path / "lock.toml").write_text(package(files) + source + package(other))
    (tmp_path / "constraints.txt").write_text(pin("a", files) + pin("b", other))
    shutil.copy(ROOT / "docker/requirements.py", tmp_path)
    command = [sys.executable, tmp_path / "requirements.py", "--shorten", tmp_path / "lock.toml"]
    subprocess.run(command, cwd=ROOT, check=True)
    text = (tmp_path / "constraints.txt").read_text()
    assert text == pin("a", [file for file in files if file in taken]) + pin("b", other)


def test_everything_but_torch_and_its_kin_is_installed_with_hashes():
    commands = re.findall(r"pip install[^&;\n]*", "\n".join(STAGES.values()))
    bare = [command.split("install ")[1].strip() for command in commands if "--require-hashes" not in command]
    assert bare == [
        '--no-deps "${TORCH}"',
        '"${TORCH}"',
        '"${FLASHINFER}"',
        '--no-deps "${FLASHINFER_JIT_CACHE}"',
        "--no-deps --no-index /tmp/wheels/*.whl",
    ]
    assert len(commands) - len(bare) == 3


def test_the_dependencies_that_an_image_installs_first():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    base, load, bench = set(listed()), set(listed("load")), set(listed("bench"))
    assert base == set(project["dependencies"])
    assert load - base == set(extras["load"])
    # An extra may name others.
    assert bench - load == set(extras["bench"]) - {"ramet[load]"}
    (named,) = (line for line in extras["dev"] if line.startswith("ramet["))
    others = set(listed(*named.removeprefix("ramet[").removesuffix("]").split(",")))
    assert bench < others
    assert set(listed("dev")) - others == set(extras["dev"]) - {named}


def test_torch_is_the_version_of_the_makefile():
    version = re.search(r"^TORCH +\?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert re.search(rf"^ARG TORCH=torch=={version}\+\$\{{DEVICE\}}$", STAGES["dependencies"], re.MULTILINE)
