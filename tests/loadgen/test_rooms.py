"""A bench or a workload is a file."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loadgen
from loadgen.commands import BENCHES, find_bench

ROOT = Path(loadgen.__file__).parent


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_has_a_name_a_summary_and_cells(name):
    kind = find_bench(name)
    first = (sys.modules[kind.__module__].__doc__ or "").splitlines()[0]
    assert first.startswith(f"`ramet bench {name}`: ")
    assert first.endswith(".")
    assert not inspect.isabstract(kind)
    assert kind.figures


def test_the_readme_adds_a_workload_and_a_bench_with_a_file_each(tmp_path):
    package = tmp_path / "loadgen"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    workload, bench = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (package / "http" / "workloads" / "constant_question.py").write_text(workload)
    (package / "micro" / "bench_sleep.py").write_text(bench)

    def call(*arguments):
        command = [sys.executable, "-m", "loadgen", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert "the time that a sleep takes" in call("--help").stdout
    measured = call("sleep", "--seconds", "0.01", "0.02", "--repeats", "2")
    assert (measured.returncode, "0.02" in measured.stdout) == (0, True), measured.stderr
    refused = call("serve", "--workload", "constant-question", "--prompt-tokens", "9", "--url", "http://127.0.0.1:9")
    assert "cannot be reached" in refused.stderr
