"""A bench or a workload is a file."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import loadgen
from loadgen.commands import BENCHES, EXPERIMENTS, find_bench

ROOT = Path(loadgen.__file__).parent
ELSEWHERE = "the bench 'step' is an experiment, and not installed; in a checkout of Ramet's repository"


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_has_a_name_a_summary_and_cells(name):
    kind = find_bench(name)
    first = (sys.modules[kind.__module__].__doc__ or "").splitlines()[0]
    assert first.startswith(f"`ramet bench {name}`: ")
    assert first.endswith(".")
    assert not inspect.isabstract(kind)
    assert kind.figures


def test_the_experiments_are_listed():
    assert sorted(EXPERIMENTS) == sorted(name for name, path in BENCHES.items() if "experiments" in path.parts)


def test_a_wheel_has_all_packages_but_the_experiments():
    found = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]["find"]
    everything = set(find_packages(str(ROOT.parent), include=found["include"]))
    left = everything - set(find_packages(str(ROOT.parent), **found))
    rooms = ("accuracy", "fleet", "gpu", "micro")
    assert left == {"loadgen.experiments", *(f"loadgen.experiments.{room}" for room in rooms)}


def called(directory, *arguments):
    """`python -m loadgen` of a directory."""
    command = [sys.executable, "-m", "loadgen", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT.parent)])}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_without_the_experiments_it_says_where_they_are(tmp_path):
    shutil.copytree(ROOT, tmp_path / "loadgen", ignore=shutil.ignore_patterns("__pycache__", "results", "experiments"))
    page = called(tmp_path, "--help").stdout
    listed = re.findall(r"^    (\w+)\s", page, re.MULTILINE)
    assert listed == ["agents", "next_turn", "policies", "prefix", "serve", "report"]
    assert f"Only a checkout of Ramet's repository has the experiments: {', '.join(EXPERIMENTS)}." in " ".join(
        page.split()
    )
    missing = called(tmp_path, "step", "--repeats", "2")
    assert (missing.returncode, missing.stderr.startswith(f"loadgen step: {ELSEWHERE}, ")) == (2, True), missing.stderr
    facts = {"bench": "step", "options": {}, "seed": 1, "machine": {}, "started": ""}
    (tmp_path / "before.jsonl").write_text(json.dumps(facts) + "\n")
    report = called(tmp_path, "report", "before.jsonl")
    assert (report.returncode, report.stderr.startswith(f"ramet bench report: {ELSEWHERE}, ")) == (2, True), (
        report.stderr
    )
    assert "cannot be reached" in called(tmp_path, "serve", "--url", "http://127.0.0.1:9").stderr
    lengths = {"input_length": 1536, "output_length": 9}
    trace = [{"timestamp": second, "hash_ids": [1, 2, 2 + second], **lengths} for second in range(9)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    replayed = called(tmp_path, "policies", "--traces", "trace.jsonl", "--capacities", "4")
    assert (replayed.returncode, "lru" in replayed.stdout) == (0, True), replayed.stderr


def test_the_readme_adds_a_workload_and_a_bench_with_a_file_each(tmp_path):
    package = tmp_path / "loadgen"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    workload, bench = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (package / "http" / "workloads" / "constant_question.py").write_text(workload)
    (package / "experiments" / "micro" / "bench_sleep.py").write_text(bench)
    assert "the time that a sleep takes" in called(tmp_path, "--help").stdout
    measured = called(tmp_path, "sleep", "--seconds", "0.01", "0.02", "--repeats", "2")
    assert (measured.returncode, "0.02" in measured.stdout) == (0, True), measured.stderr
    refused = called(
        tmp_path, "serve", "--workload", "constant-question", "--prompt-tokens", "9", "--url", "http://127.0.0.1:9"
    )
    assert "cannot be reached" in refused.stderr
