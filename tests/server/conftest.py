"""A live server on the real model, and a client for it."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import httpx
import openai
import pytest

from tests.runtime.features.diffusion.bicache.models import save_tiny

# Each test has clients of its own, and each of them would read the system's certificates, for 25 ms of the processor.
httpx._transports.default.create_ssl_context = lru_cache(httpx._transports.default.create_ssl_context)

# Seconds until what must come counts as missing: on a busy machine any process may stand still for a while.
PATIENCE_S = 120.0
for _limit in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _limit, PATIENCE_S)


@dataclass
class LiveServer:
    """A server process."""

    process: subprocess.Popen
    url: str
    log: Path

    def state(self) -> dict:
        return httpx.get(f"{self.url}/server_info").json()["state"]

    def wait(self, condition: Callable[[dict], bool], seconds: float = PATIENCE_S) -> dict:
        """Poll the engine's state until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, state
            time.sleep(0.05)
        return state

    def check_idle(self) -> None:
        """Nothing runs, and every page is free or in the tree."""
        state = self.wait(lambda s: s["running"] == s["waiting"] == 0)
        assert state["pages_private"] == state["pages_locked"] == 0
        assert state["pages_free"] + state["pages_tree"] == state["pages_total"]

    @contextmanager
    def leaving(self, path: str, body: dict) -> Iterator[None]:
        """A client that posts a body and leaves at the end of the context, whether it has its answer or not."""
        host, port = self.url.removeprefix("http://").split(":")
        content = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step is computed meanwhile, so that no machine is too quick for what a test does."""
        httpx.post(f"{self.url}/pause").raise_for_status()
        try:
            yield
        finally:
            httpx.post(f"{self.url}/resume").raise_for_status()

    @contextmanager
    def waiting(self, path: str, body: dict) -> Iterator[Future]:
        """The answer to come to a request that waits meanwhile."""
        with ThreadPoolExecutor(1) as pool, self.paused():
            answer = pool.submit(httpx.post, self.url + path, json=body)
            self.wait(lambda state: state["waiting"] == 1)
            yield answer

    def leave(self, path: str, body: dict) -> dict:
        """The state after a client has left while its request waited."""
        with self.paused():
            with self.leaving(path, body):
                self.wait(lambda state: state["waiting"] == 1)
            return self.wait(lambda state: state["waiting"] == 0)

    def engine_pid(self) -> int:
        """The engine process, by the parent's id."""
        children = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        return next(int(line.split()[0]) for line in children.stdout.splitlines() if "runtime.process" in line)


def start(
    log: Path, *options: str, verify: ssl.SSLContext | bool = True, own_group: bool = False, before: str = ""
) -> LiveServer:
    """Start `ramet serve` on a free port, if asked for as the leader of a process group, and wait until it serves.

    `before`: what the process runs first.
    """
    code = f"{before}; import runpy; runpy.run_module('server.cli', run_name='__main__')"
    module = ["-c", code] if before else ["-m", "server.cli"]
    command = [sys.executable, *module, "serve", "--port", "0", "--dtype", "float32", "--threads", "1", *options]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            process_group=0 if own_group else None,
        )
    server = LiveServer(process, "", log)
    try:
        return _wait_until_it_serves(server, verify)
    except BaseException:
        process.kill()  # the engine ends with it
        raise


def _wait_until_it_serves(server: LiveServer, verify: ssl.SSLContext | bool) -> LiveServer:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"serving on (https?://[^\s\"]+)", server.log.read_text())):
        assert server.process.poll() is None, server.log.read_text()
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)
    server = replace(server, url=found[1])
    while True:
        try:
            if httpx.get(f"{server.url}/health", verify=verify).status_code == 200:
                return server
        except httpx.TransportError:
            time.sleep(0.05)


def stop(server: LiveServer) -> int:
    """SIGTERM, and the exit code."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    return server.process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def guarded(tiny_dir, tmp_path_factory) -> Iterator[LiveServer]:
    """A server on a tiny model with the keys of an admin and of alice."""
    directory = tmp_path_factory.mktemp("guarded")
    keys = directory / "keys"
    keys.write_text("boss boss-secret-key admin\nalice alice-secret-key\n")
    options = ["--pool-tokens", "4096", "--api-keys", str(keys), "--host-memory", "0.1", "--admin-root", str(directory)]
    server = start(directory / "log", "--model", str(tiny_dir), *options)
    yield server
    assert stop(server) == 0


@pytest.fixture(scope="session")
def server(default_model_dir, tmp_path_factory) -> Iterator[LiveServer]:
    """One server for all tests that leave it as they found it; its pages are checked at the end."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = start(log, "--model", str(default_model_dir), "--served-model-name", "smollm2", "--pool-tokens", "8192",
                   "--hold-time", "0:600", "--debug-invariants")  # fmt: skip
    yield server
    server.check_idle()
    assert stop(server) == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def denoiser(default_model_dir, tmp_path_factory) -> Iterator[LiveServer]:
    """A server of a small random LLaDA; its pages are checked at the end."""
    directory = tmp_path_factory.mktemp("denoiser")
    path = save_tiny("llada", directory / "tiny-llada", tokenizer_from=default_model_dir)
    server = start(directory / "log", "--model", str(path), "--pool-tokens", "4096", "--debug-invariants")
    yield server
    server.check_idle()
    assert stop(server) == 0
    log = (directory / "log").read_text()
    assert "Traceback" not in log
    assert "no depth table for this model" in log


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    server.check_idle()


@pytest.fixture
def api(client, server) -> Iterator[openai.OpenAI]:
    """The real client of OpenAI's API."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api
