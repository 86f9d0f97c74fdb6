"""LiteLLM's proxy in front of the server: chats, responses and Anthropic's messages."""

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from socket import socket

url, model = sys.argv[1:]
home = Path(tempfile.mkdtemp(prefix="litellm-"))
served = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
config = {
    "model_list": [{"model_name": "tree", "litellm_params": served}],
    "general_settings": {"master_key": (key := f"sk-{token_hex(16)}")},
}
(home / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
with closing(socket()) as one:
    one.bind(("127.0.0.1", 0))
    port = one.getsockname()[1]
where = f"http://127.0.0.1:{port}"


def ask(path: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(where + path, data, headers), timeout=120) as answer:
        return json.load(answer)


command = [str(Path(sys.executable).with_name("litellm")), "--config", str(home / "config.yaml"), "--port", str(port)]
with (home / "log").open("w") as log:
    proxy = subprocess.Popen([*command, "--host", "127.0.0.1"], cwd=home, stdout=log, stderr=log)
try:
    deadline = time.monotonic() + 240
    while True:
        try:
            ask("/health/liveliness")
            break
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, (home / "log").read_text()[-2000:]
            assert proxy.poll() is None, (home / "log").read_text()[-2000:]
            time.sleep(0.5)
    asked = [{"role": "user", "content": "Name a tree."}]
    assert ask("/v1/chat/completions", {"model": "tree", "messages": asked, "max_tokens": 8})["choices"][0]["message"]
    answer = ask("/v1/responses", {"model": "tree", "input": "Name a tree.", "max_output_tokens": 8})
    assert answer["output"][0]["content"][0]["text"]
    assert ask("/v1/messages", {"model": "tree", "messages": asked, "max_tokens": 8})["content"]
finally:
    proxy.terminate()
    proxy.wait(30)
print("chats, responses, messages")
