"""`ramet bench blocks` on a small model: it runs, and its rows are those that the steps must have."""

from __future__ import annotations

import json

from server.cli import main


def test_it_runs(tmp_path, capsys):
    options = "--layers 1 --prefix 48 --prompt 4 --output 8 --steps 4 1 --rounds 1 --dtype float32"
    files = [
        "--json",
        str(tmp_path / "a.json"),
        "--markdown",
        str(tmp_path / "a.md"),
        "--plot",
        str(tmp_path / "a.png"),
    ]
    assert main(["bench", "blocks", *options.split(" "), *files]) == 0
    assert "48 + 4 tokens, 8 new ones, blocks of 4" in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())["requests"]
    assert list(found) == ["causal", "blocks, 4 steps each", "blocks, 1 steps each"]
    assert {name: [each["rows"] for each in requests] for name, requests in found.items()} == {
        # All of the prompt, then every token but the last.
        "causal": [52 + 7, 4 + 7],
        # All of the prompt; two blocks of 4 rows in each of their steps, and the first one again when it is whole.
        "blocks, 4 steps each": [52 + 32 + 4, 4 + 32 + 4],
        "blocks, 1 steps each": [52 + 8 + 4, 4 + 8 + 4],
    }
    assert [each["reused"] for each in found["causal"]] == [0, 48 / 52]
    assert "| blocks, 1 steps each |" in (tmp_path / "a.md").read_text()
    assert (tmp_path / "a.png").stat().st_size > 1000
