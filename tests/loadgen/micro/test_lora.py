"""`ramet bench lora` on a small model: it runs, and its adapters are computed."""

from __future__ import annotations

import json

from server.cli import main


def test_it_runs(tmp_path, tiny_dir):
    options = f"--model {tiny_dir} --dtype float32 --code native torch --rank 2 --requests 1 2 --adapters 0 1 2"
    options += " --prompt 8 --steps 2 --rounds 2"
    names = [("--json", "a.json"), ("--markdown", "a.md"), ("--plot", "a.png")]
    files = [part for option, name in names for part in (option, str(tmp_path / name))]
    assert main(["bench", "lora", *options.split(), *files]) == 0
    cells = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert [(cell["code"], cell["requests"], cell["adapters"]) for cell in cells] == [
        (code, *both) for code in ("native", "torch") for both in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2))
    ]
    assert all(len(cell["step_s prefill_s"]) == 2 for cell in cells)
    table = (tmp_path / "a.md").read_text().splitlines()
    assert [line.split("|")[5].strip() == "" for line in table[2:]] == [True, False, True, False, False] * 2
    assert (tmp_path / "a.png").stat().st_size > 1000
