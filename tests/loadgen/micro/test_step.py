"""`ramet bench step` on a small model: parts that add up, the table, and an engine that is left as it was."""

from __future__ import annotations

import argparse
import json

import pytest

from loadgen.micro import bench_step
from runtime.execution.native.library import load_best


@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_it_measures_every_part_and_writes(tiny_dir, tmp_path, monkeypatch, drafts, capsys):
    monkeypatch.setattr(bench_step, "_SHARED", 64)
    before = vars(load_best())["decoder_forward"] if load_best() else None
    parser = argparse.ArgumentParser()
    bench_step.add_arguments(parser)
    files = [f"--{kind}={tmp_path / 's'}.{kind}" for kind in ("json", "markdown")] + [f"--plot={tmp_path}/s.png"]
    small = ["--dtype=float32", "--batches", "1", "3", "--steps=2", "--rounds=1", "--threads=1", f"--drafts={drafts}"]
    assert bench_step.run(parser.parse_args([f"--model={tiny_dir}", *small, *files])) == 0
    cells = json.loads((tmp_path / "s.json").read_text())["cells"]
    assert [(cell["choice"], cell["batch"]) for cell in cells] == [(c, b) for c in bench_step.CHOICES for b in (1, 3)]
    for one in (one for cell in cells for one in cell["rounds"]):
        assert all(one[part] >= 0 for part in bench_step.PARTS)
        assert min(one["plan"], one["choice"], one["booking"], one["cores"]) > 0
        assert (one["drafts"] > 0) == (drafts == "auto")
        assert one["step"] >= max(one[part] for part in bench_step.PARTS)
    assert (tmp_path / "s.markdown").read_text().count("\n") == 2 + len(cells)
    assert (tmp_path / "s.png").stat().st_size > 10_000
    assert "top-p" in capsys.readouterr().out
    assert before == (vars(load_best())["decoder_forward"] if load_best() else None)
