"""The Dockerfile: it copies files that exist and that the build may see, and the pins fit the distribution."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
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
    used = [found for text in STAGES.values() for found in re.findall(r"^COPY .*--from=(\w+)", text, re.MULTILINE)]
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


def test_every_dependency_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "docker/constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = [
        requirement for name in ("load", "bench", "otel") for requirement in project["optional-dependencies"][name]
    ]
    for text in [*project["dependencies"], *extras]:
        requirement = Requirement(text)
        if requirement.name not in ("torch", "ramet"):
            assert requirement.specifier.contains(pins[requirement.name], prereleases=True), text


def test_the_dependencies_that_an_image_installs_first():
    def listed(*extras: str) -> set[str]:
        command = [sys.executable, "docker/requirements.py", *extras]
        return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert listed() == set(project["dependencies"])
    assert listed("load") - listed() == set(extras["load"])
    # An extra may name others.
    assert listed("bench") - listed("load") == set(extras["bench"]) - {"ramet[load]"}
    assert listed("dev") - listed("bench", "otel") == set(extras["dev"]) - {"ramet[bench,otel]"}


def test_torch_is_the_version_of_the_makefile():
    version = re.search(r"^TORCH +\?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert re.search(rf"^ARG TORCH=torch=={version}\+\$\{{DEVICE\}}$", STAGES["dependencies"], re.MULTILINE)
