"""The Dockerfiles: they copy what exists and what the build may see, and the pins fit the distribution."""

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
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))


def instructions(path: Path, keyword: str) -> list[str]:
    text = re.sub(r"\\\n", " ", path.read_text())
    return [line.removeprefix(keyword).strip() for line in text.splitlines() if line.startswith(f"{keyword} ")]


def copied(path: Path) -> set[str]:
    """What a Dockerfile copies out of the repository."""
    lines = [line.split() for line in instructions(path, "COPY") if "--from=" not in line]
    return {source for line in lines for source in line[:-1] if not source.startswith("--")}


def test_there_are_all():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cuda", "Dockerfile.router"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile(path):
    sources = copied(path)
    assert sources
    assert all((ROOT / source).exists() for source in sources)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources <= allowed
    assert re.fullmatch(r"\d+:\d+", instructions(path, "USER")[-1])
    assert instructions(path, "ENTRYPOINT")[-1].startswith("[")
    assert len(instructions(path, "HEALTHCHECK")) == 1
    stages = {found for line in instructions(path, "FROM") for found in re.findall(r" AS (\w+)", line)}
    used = {found for line in instructions(path, "COPY") for found in re.findall(r"--from=(\w+)", line)}
    assert used <= stages
    assert "g++" not in re.split(r"^FROM ", path.read_text(), flags=re.MULTILINE)[-1]


def test_the_build_sees_nothing_but_what_is_copied():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    everything = set().union(*map(copied, DOCKERFILES))
    assert {line[1:] for line in lines if line.startswith("!")} == everything
    # Secrets lie beside the Dockerfiles.
    assert not any(fnmatch.fnmatch("docker/secrets", line[1:]) for line in lines if line.startswith("!"))


def test_every_dependency_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "docker/constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = [requirement for name in ("bench", "otel") for requirement in project["optional-dependencies"][name]]
    for text in [*project["dependencies"], *extras]:
        requirement = Requirement(text)
        if requirement.name != "torch":
            assert requirement.specifier.contains(pins[requirement.name], prereleases=True), text


def test_the_dependencies_that_an_image_installs_first():
    def listed(*extras: str) -> set[str]:
        command = [sys.executable, "docker/requirements.py", *extras]
        return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed() == set(project["dependencies"])
    assert listed("bench") - listed() == set(project["optional-dependencies"]["bench"])


def test_torch_is_the_version_of_the_makefile():
    version = re.search(r"^TORCH +\?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for path, suffix in (("Dockerfile", r"\+cpu"), ("Dockerfile.cuda", "")):
        assert re.search(rf"^ARG TORCH=torch=={version}{suffix}$", (ROOT / "docker" / path).read_text(), re.MULTILINE)
