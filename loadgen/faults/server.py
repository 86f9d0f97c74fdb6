"""The server under test, its state after a case, and a raw connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from loadgen.http.local_server import start_server

_IDLE_S = 60.0
# Allowed growth of resident memory.
MEMORY_SHARE = 0.05


@dataclass
class Finding:
    """The result of a case.

    Attributes:
        done: the treatment, in words.
        seen: the measurements, in words.
        problems: violations; empty if the server stood the case.
        facts: figures for JSON.
        rows: a table of the single parts, its columns first.
    """

    done: str
    seen: str = ""
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Sequence[str]] = field(default_factory=list)


class Server:
    """One server process and a client for it.

    Attributes:
        process: of the server.
        url: of the server.
        start_s: seconds of its start.
        http: a client without keep-alive.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, start_s: float, http: aiohttp.ClientSession):
        self.process = process
        self.url = url
        self.start_s = start_s
        self.http = http

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a Wire."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a request."""
        async with self.http.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str) -> Any:
        """JSON of a route."""
        async with self.http.get(self.url + path) as answer:
            return await answer.json(content_type=None)

    async def ready(self) -> bool:
        """The answer of `/ready`; False without a connection."""
        try:
            async with self.http.get(f"{self.url}/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def generate(self, prompt: list[int], tokens: int, **body: Any) -> tuple[int, Any]:
        """Complete token ids greedily, to exactly `tokens` tokens."""
        return await self.post("/generate", **_greedy(prompt, tokens), **body)

    def stream(self, prompt: list[int], tokens: int, **body: Any) -> Any:
        """The same as a stream; the HTTP response, to be entered."""
        return self.http.post(f"{self.url}/generate", json={**_greedy(prompt, tokens), "stream": True, **body})

    async def state(self) -> dict[str, Any]:
        """The engine's counters and gauges."""
        return (await self.get("/server_info"))["state"]

    def engine_pid(self) -> int:
        """Process id of the engine. Raises RuntimeError if there is none."""
        pid = find_engine(self.process.pid)
        if pid is None:
            raise RuntimeError("the server has no engine process")
        return pid

    def memory(self) -> dict[str, float]:
        """Resident memory of both processes in MiB."""
        return {"server": memory_mib(self.process.pid, "VmRSS"), "engine": memory_mib(self.engine_pid(), "VmRSS")}

    async def warm_up(self, draw: random.Random) -> None:
        """Touch the whole pool, and everything that stays in memory after its first use.

        The first grammar loads its library with a table of the vocabulary (60 MiB in the engine, once); the first long
        prompt with log-probabilities takes the largest logits of a step (40 MiB).
        """
        info = (await self.get("/server_info"))["model_info"]
        length = min(1024, info["context_length"] - 64, info["pool_tokens"] // 2)
        await asyncio.gather(*(self.generate(ids(draw, 40), 16) for _ in range(32)))
        await asyncio.gather(*(self.generate(ids(draw, length), 8) for _ in range(info["pool_tokens"] // length + 1)))
        await self.post("/generate", text="x", sampling_params={"max_new_tokens": 2, "regex": "[a-z]+"})
        await self.generate(ids(draw, length), 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)

    async def problems(self, before: dict[str, float] | None = None) -> list[str]:
        """Problems once the server is idle: lost pages, locked nodes, grown memory, no answer."""
        found = []
        deadline = time.monotonic() + _IDLE_S
        while (state := await self.state())["running"] or state["waiting"] or state["pages_private"]:
            if time.monotonic() > deadline:
                found.append(f"{state['running']} requests still run, {state['waiting']} wait")
                break
            await asyncio.sleep(0.1)
        if state["pages_free"] + state["pages_tree"] + state["pages_private"] != state["pages_total"]:
            found.append("pages are lost")
        locked = state["pages_locked"]
        if locked or state["pages_private"]:
            found.append(f"{locked} pages locked, {state['pages_private']} private")
        for name, mib in self.memory().items() if before else ():
            if before and mib > before[name] * (1 + MEMORY_SHARE):
                found.append(f"the {name} grew from {before[name]:.0f} to {mib:.0f} MiB")
        status, _ = await self.generate(ids(random.Random(0), 20), 4)
        return found if status == 200 else [*found, f"a good request is answered with {status}"]


def _greedy(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


def ids(draw: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [draw.randrange(200, 20_000) for _ in range(count)]


def http_client() -> aiohttp.ClientSession:
    """A client without keep-alive, which opens as many connections as it is asked to."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=600)
    )


@asynccontextmanager
async def running_server(options: Sequence[str]) -> AsyncIterator[Server]:
    """A new server, which is ended afterwards in any state."""
    started_s = time.monotonic()
    process, url = await asyncio.to_thread(start_server, options)
    try:
        async with http_client() as http:
            yield Server(process, url, time.monotonic() - started_s, http)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            process.kill()


class Wire:
    """A raw connection, for clients that misbehave. To be entered before use."""

    def __init__(self, address: tuple[str, int], receive_buffer: int | None = None):
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._address = address

    async def __aenter__(self) -> Wire:
        await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self, count: int = 65_536) -> bytes:
        """Some bytes; none at the end, also if the connection is reset."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, count)
        except ConnectionError:
            return b""

    async def receive_all(self) -> bytes:
        """All bytes up to the end."""
        parts = []
        while part := await self.receive():
            parts.append(part)
        return b"".join(parts)

    def reset(self) -> None:
        """Close the connection with a reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()


def request(body: bytes | dict[str, Any], path: str = "/generate") -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def find_engine(pid: int) -> int | None:
    """Process id of a server's engine; None if there is none."""
    for child in _children(pid):
        with contextlib.suppress(OSError):
            if b"runtime.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
    return None


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def memory_mib(pid: int, name: str) -> float:
    """A figure of a process's status: `VmRSS` is what is resident, `VmHWM` the most that ever was."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name))


def cpu_seconds(pid: int) -> float:
    """Of a process until now."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
