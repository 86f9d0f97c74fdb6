"""`ramet bench kernels` on a small model: every part, of two builds side by side."""

from __future__ import annotations

import argparse
import json

import pytest

from loadgen.micro import bench_kernels
from runtime.execution.native.library import load_best


@pytest.fixture
def run(tiny_dir, tmp_path):
    def run(*options):
        parser = argparse.ArgumentParser()
        bench_kernels.add_arguments(parser)
        sizes = ["--rows", "3", "--prompts", "300", "--batches", "2", "--shared", "64", "--rounds", "2"]
        files = ["--json", str(tmp_path / "k.json"), "--plot", str(tmp_path / "k.png")]
        return bench_kernels.run(parser.parse_args(["--model", str(tiny_dir), *sizes, *files, *options]))

    return run


def test_it_measures_builds_side_by_side(run, tmp_path):
    library = load_best()
    if library is None:
        pytest.skip("the native kernels were not built")
    assert run("--builds", library.isa, f"other={library.path}", "--threads", "1") == 0
    seconds = json.loads((tmp_path / "k.json").read_text())["seconds"]
    parts = [("rows 3", "torch"), *((part, None) for part in ("rows 3", "prompt 300", "decode 2", "shared 2"))]
    keys = [f"{part} {build}" for part, only in parts for build in ([only] if only else [library.isa, "other"])]
    assert list(seconds) == keys
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
    assert (tmp_path / "k.png").stat().st_size > 10_000


def test_nothing_to_measure(run, capsys):
    for option in ("--rows", "--rounds", "--batches", "--prompts", "--shared", "--threads"):
        with pytest.raises(SystemExit, match="2"):
            run(option, "0")
        assert f"argument {option}: must be at least 1" in capsys.readouterr().err


def test_a_build_that_is_not_there(run, capsys):
    assert run("--builds", "other=/nowhere.so") == 1
    assert "other" in capsys.readouterr().out
