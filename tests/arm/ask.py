"""Asks a server of a GGUF file in 4 to 8 bits, one of the default model, and one of each file that is named.

Prints what computed the answers.
"""

import sys
import tempfile
from pathlib import Path

import httpx

from loadgen.http import local_server
from tests.runtime.models.test_gguf_files import Kind, write

local_server.START_SECONDS = 3600  # a file in 4 bits is packed at its first start
# As on x86.
RANDOM, PARIS = [96, 196, 19, 28], [7042, 30, 198, 198]


def ask(options: list[str], **prompt: object) -> list[int]:
    """The four tokens behind a prompt."""
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    with local_server.local_server(options) as url:
        answer = httpx.post(f"{url}/generate", json={**prompt, "sampling_params": sampling}, timeout=600)
        info = httpx.get(f"{url}/server_info", timeout=600).json()["model_info"]
    assert len(answer.json()["output_ids"]) == 4, answer.text
    assert info["attention_backend"].startswith("native-neon"), info
    found = answer.json()
    print(f"{info['name']}, {info['attention_backend']}: {found['output_ids']} {found['text']!r}", flush=True)
    return found["output_ids"]


with tempfile.TemporaryDirectory() as directory:
    path = write(Path(directory) / "m.gguf", kind=Kind.Q4_0)
    assert ask(["--model", str(path)], input_ids=[5, 6, 7]) == RANDOM
assert ask([], text="The capital of France is") == PARIS
for file in sys.argv[1:]:
    ask(["--model", file], text="The capital of France is")
