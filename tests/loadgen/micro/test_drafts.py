"""`ramet bench drafts` on a small model: both ways of every task, and a grammar that holds the model to its answer."""

from __future__ import annotations

import argparse
import json

from loadgen.micro import bench_drafts


def test_it_measures_and_writes(tiny_dir, tmp_path):
    parser = argparse.ArgumentParser()
    bench_drafts.add_arguments(parser)
    small = ["--dtype", "float32", "--tasks", "edit", "again", "--clients", "2", "--output", "16", "--rounds", "2",
             "--questions", "1"]  # fmt: skip
    files = [f"--{kind}={tmp_path / name}" for kind, name in
             (("json", "d.json"), ("plot", "d.png"), ("markdown", "d.md"))]  # fmt: skip
    assert bench_drafts.run(parser.parse_args(["--model", str(tiny_dir), *small, *files])) == 0
    edit, again = json.loads((tmp_path / "d.json").read_text())["cells"]
    for cell in (edit, again):
        assert len(cell["off"]) == len(cell["auto"]) == 2
        assert min(cell["off"] + cell["auto"]) > 0
        assert 0 <= cell["accepted"] <= cell["drafted"]
    assert again["output"] == 2 * 2 * 16
    assert edit["output"] > 2 * 2 * 60, "the whole function"
    assert (tmp_path / "d.md").read_text().count("\n") == 4
    assert (tmp_path / "d.png").stat().st_size > 10_000
