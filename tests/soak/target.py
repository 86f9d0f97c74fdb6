"""The server under test, seen by many clients at once, and the checks after them."""

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.resident import resident_bytes
from tests.server.conftest import PATIENCE_S, LiveServer, start, stop

# Multiplies all counts and durations.
SCALE = float(os.environ.get("RAMET_SOAK_SCALE", "1"))
# Allowed growth of resident memory: a share, and recent prompts for comparisons, which the server keeps up to a bound.
MEMORY_SHARE, PROMPTS_MIB = 0.05, 10


def scaled(count: float, least: int = 4) -> int:
    """A count, multiplied by the scale."""
    return max(int(count * SCALE), least)


def ids(draw: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [draw.randrange(200, 20_000) for _ in range(count)]


def greedy(prompt: list[int], tokens: int, **body: Any) -> dict[str, Any]:
    """A request for exactly `tokens` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **body}


class Answer(NamedTuple):
    """A stream's status, its last event before `[DONE]` (None: it was cut), and the number of its events."""

    status: int
    end: dict[str, Any] | None
    events: int

    @property
    def fate(self) -> str:
        """The end in a word: whole, aborted, told (an error event), refused (503), cut, or without connection."""
        if self.status != 200:
            return {0: "without connection", 503: "refused"}.get(self.status, f"status {self.status}")
        if self.end is None:
            return "cut"
        if "error" in self.end:
            return "told"
        return {"length": "whole", "abort": "aborted"}[self.end["meta_info"]["finish_reason"]["type"]]


class Target:
    """A live server and a client without keep-alive."""

    def __init__(self, live: LiveServer, http: aiohttp.ClientSession):
        self.live, self.url, self.http = live, live.url, http

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a request."""
        async with self.http.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str) -> Any:
        """JSON of a route."""
        async with self.http.get(self.url + path) as answer:
            return await answer.json(content_type=None)

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        """A greedy answer."""
        status, answer = await self.post("/generate", **greedy(prompt, count))
        assert status == 200, answer
        return answer["output_ids"]

    async def follow(self, prompt: list[int], count: int, begun: asyncio.Event | None = None) -> Answer:
        """Read a stream to its end, in whatever way it ends."""
        last, end, events, status = None, None, 0, 0
        try:
            async with self.http.post(f"{self.url}/generate", json=greedy(prompt, count, stream=True)) as answer:
                status = answer.status
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]"):
                        end = last
                    elif line.startswith(b"data: "):
                        last, events = json.loads(line[6:]), events + 1
                        if begun is not None:
                            begun.set()
        except aiohttp.ClientError:
            pass
        return Answer(status, end, events)

    async def ready(self, wanted: bool = True, seconds: float = PATIENCE_S) -> bool:
        """Wait until `/ready` says so; whether it did."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                async with self.http.get(f"{self.url}/ready") as answer:
                    found = answer.status == 200
            except aiohttp.ClientError:
                found = False
            if found == wanted:
                return True
            await asyncio.sleep(0.02)
        return False

    def memory(self) -> dict[str, float]:
        """Resident memory of both processes in MiB."""
        pids = {"server": self.live.process.pid, "engine": self.live.engine_pid()}
        return {name: resident_bytes(pid) / (1 << 20) for name, pid in pids.items()}

    async def warm_up(self, draw: random.Random) -> None:
        """Touch the whole pool, and everything that stays in memory after its first use."""
        info = (await self.get("/server_info"))["model_info"]
        length = min(1024, info["context_length"] - 64, info["pool_tokens"] // 2)
        await asyncio.gather(*(self.tokens(ids(draw, 40), 16) for _ in range(32)))
        await asyncio.gather(*(self.tokens(ids(draw, length), 8) for _ in range(info["pool_tokens"] // length + 1)))
        await self.post("/generate", text="x", sampling_params={"max_new_tokens": 2, "regex": "[a-z]+"})

    async def check(self, before: dict[str, float] | None = None) -> None:
        """All pages are free or in the tree, nothing is locked, memory has not grown, and a request is answered."""
        await asyncio.to_thread(self.live.check_idle)
        after = self.memory()
        for name, mib in (before or {}).items():
            most = mib * (1 + MEMORY_SHARE) + (PROMPTS_MIB if name == "server" else 0)
            assert after[name] <= most, f"the {name} grew from {mib:.0f} to {after[name]:.0f} MiB"
        await self.tokens(ids(random.Random(0), 20), 4)

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[socket.socket]:
        """A raw connection."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
            yield connection


@asynccontextmanager
async def target(model: Path, log: Path, *options: str) -> AsyncIterator[Target]:
    """A new server, without drafts: quick streams would end before they are disturbed."""
    live = await asyncio.to_thread(start, log, "--model", str(model), "--drafts", "off", *options)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as http:
            yield Target(live, http)
    finally:
        await asyncio.to_thread(stop, live)


def post(path: str, body: bytes) -> bytes:
    """The bytes of a POST."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


async def read(connection: socket.socket, most: float = float("inf")) -> bytes:
    """The bytes up to the end or a reset, at most about `most`."""
    data = b""
    while len(data) < most:
        try:
            part = await asyncio.get_running_loop().sock_recv(connection, 65_536)
        except ConnectionError:
            break
        if not part:
            break
        data += part
    return data
