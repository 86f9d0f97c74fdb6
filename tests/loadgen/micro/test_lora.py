"""`ramet bench lora` on a small model: it runs, and its adapters are computed."""

from __future__ import annotations

import json

import pytest

from server.cli import main
from tests.runtime.execution.transformers.architectures import save_small


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


def test_experts_without_weights(tmp_path):
    """In the kernels and in transformers' code, which has adapters as well."""
    save_small("Qwen3Moe", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    options = f"--model {tmp_path} --random-weights --code native transformers --requests 1 --adapters 0 1 --rank 2"
    options += f" --prompt 8 --steps 2 --rounds 1 --json {tmp_path / 'a.json'}"
    assert main(["bench", "lora", *options.split()]) == 0
    cells = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert [(cell["code"], cell["adapters"]) for cell in cells] == [
        (code, count) for code in ("native", "transformers") for count in (0, 1)
    ]


def test_nothing_to_measure(capsys):
    for option in ("--rounds 0", "--prompt 0", "--adapters -1", "--requests 0"):
        with pytest.raises(SystemExit) as end:
            main(["bench", "lora", *option.split()])
        assert end.value.code == 2
        assert "at least" in capsys.readouterr().err
