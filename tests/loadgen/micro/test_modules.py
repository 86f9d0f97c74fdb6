"""`ramet bench modules` on a small model: its ways to have the same prompt, and what each finds in the cache."""

from __future__ import annotations

import argparse
import json

from loadgen.micro import bench_modules


def test_it_measures_and_writes(tiny_dir, tmp_path):
    parser = argparse.ArgumentParser()
    bench_modules.add_arguments(parser)
    small = ["--dtype", "float32", "--lengths", "96", "200", "--modules", "4", "--new", "16", "--arguments", "0", "10"]
    more = ["--together", "3", "--shared", "200", "--steps", "3", "--repeats", "2"]
    files = ["--json", str(tmp_path / "m.json"), "--plot", str(tmp_path / "m.png")]
    assert bench_modules.run(parser.parse_args(["--model", str(tiny_dir), *small, *more, *files])) == 0
    figures = json.loads((tmp_path / "m.json").read_text())
    ways = figures["first"]["200"]
    assert len(ways) == 5
    assert all(min(found["ttft"]) > 0 and len(found["tpot"]) == 2 for found in ways.values())
    assert ways["full prefill"]["cached"] == [0, 0]
    assert ways["prefix caching, the same order"]["cached"] == [200, 200]
    assert ways["modules, 0 % arguments"]["cached"] == [200, 200], "in any order"
    assert ways["modules, 10 % arguments"]["cached"] == [200 - 5 - 5 - 5 - 3] * 2
    pages = {name: found["pages"] for name, found in figures["together"].items()}
    assert pages["prefix"] == 12 + 3 * 2, "a shared prefix once, and two pages of each request"
    assert pages["modules"] == 4 + 4 + 4 + 3 + 3, "each module once"
    assert (tmp_path / "m.png").stat().st_size > 10_000
