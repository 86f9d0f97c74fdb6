"""Asks a server of a GGUF file in 4 to 8 bits, and one of the default model; prints what computed the answers."""

import tempfile
from pathlib import Path

import httpx

from loadgen.http.local_server import local_server
from tests.runtime.execution.native.test_stored import MIXED, make_file


def ask(options: list[str], **prompt: object) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    with local_server(options) as url:
        answer = httpx.post(f"{url}/generate", json={**prompt, "sampling_params": sampling}, timeout=600)
        info = httpx.get(f"{url}/server_info", timeout=600).json()["model_info"]
    assert len(answer.json()["output_ids"]) == 4, answer.text
    assert info["attention_backend"].startswith("native-neon"), info
    print(f"{info['name']}, {info['attention_backend']}: {answer.json()['output_ids']} {answer.json()['text']!r}")


with tempfile.TemporaryDirectory() as directory:
    ask(["--model", str(make_file(Path(directory) / "m.gguf", MIXED, tied=False))], input_ids=[5, 6, 7])
    ask([], text="The capital of France is")
