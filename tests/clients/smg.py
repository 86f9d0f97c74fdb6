"""The routers smg and sglang-router in front of the server: they find the model, and pass chats and `/generate` on."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from socket import socket

url, model = sys.argv[1:]
os.environ["NO_PROXY"] = "*"


def ask(address: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def free_port() -> int:
    with closing(socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def route(module: str) -> str:
    port = free_port()
    command = [sys.executable, "-m", module, "--worker-urls", url, "--host", "127.0.0.1", "--port", str(port)]
    router = subprocess.Popen([*command, "--prometheus-port", str(free_port())])
    where = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                found = ask(f"{where}/v1/models")
                if found["data"]:
                    break
            except (urllib.error.URLError, ConnectionError):
                pass
            assert time.monotonic() < deadline, "the router finds no model"
            time.sleep(0.5)
        assert model in [one["id"] for one in found["data"]], found
        sampling = {"max_new_tokens": 4, "temperature": 0}
        assert ask(f"{where}/generate", {"text": "1, 2, 3,", "sampling_params": sampling})["text"]
        chat = {"model": model, "messages": [{"role": "user", "content": "Name a tree."}], "max_tokens": 8}
        assert ask(f"{where}/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    finally:
        router.terminate()
        router.wait(30)
    return module


print("model, /generate and chats by", ", ".join(map(route, ("smg.launch_router", "sglang_router.launch_router"))))
