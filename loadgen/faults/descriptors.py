"""Case of connections that are silent, more than the server may hold, and of a server without descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from loadgen.faults.server import Finding, Server, Wire, cpu_seconds, ids

# Of the server's connections; the server has `--max-connections MOST`.
MOST = 256
_TOKENS = 400
# Descriptors beside connections.
_OTHERS = 128
_HEALTHY_WITHIN_S = 3.0
_REACHED_WITHIN_S = 20.0
# While there is no descriptor: CPU seconds a second, and bytes of the log.
_BUSY, _WRITTEN = 0.5, 4096


async def descriptors(server: Server, scale: float, draw: random.Random) -> Finding:
    """Silent connections, four times as many as may be open; then a limit that leaves no descriptor to accept with."""
    count, seconds = max(int(1100 * scale), MOST + 64), max(5 * scale, 1)
    _allow(count + 2 * _OTHERS)
    await server.warm_up(draw)
    before = server.memory()
    stream = asyncio.ensure_future(_stream(server, draw))
    while not (stream.done() or (await server.state())["running"]):
        await asyncio.sleep(0.02)
    async with AsyncExitStack() as silent:
        for _ in range(count):
            await silent.enter_async_context(Wire(server.address))
        held = len(_descriptors(server))
        # The first probe waits until the connections before it are accepted, of which the kernel keeps 2,048.
        reached_s = await _health(server)
        healthy = [await _health(server) for _ in range(20)]
        status, _ = await server.generate(ids(draw, 20), 4)
        events = await stream  # else it would keep the server busy
        busy, written = await _exhaust(server, seconds)
        after_s = await _health(server)
    problems = await server.problems(before)
    if events < _TOKENS:
        problems.append(f"a stream that ran before ended after {events} of {_TOKENS} tokens")
    if max(healthy) > _HEALTHY_WITHIN_S or reached_s > _REACHED_WITHIN_S or status != 200:
        problems.append(f"/health took {reached_s:.2f} s, then {max(healthy):.2f} s, and a request has {status}")
    if held > MOST + _OTHERS:
        problems.append(f"{held} descriptors are open")
    if busy > _BUSY or written > _WRITTEN:
        problems.append(f"without descriptors it takes {busy:.2f} CPUs and writes {written} bytes in {seconds:.0f} s")
    if after_s > _HEALTHY_WITHIN_S:
        problems.append(f"/health took {after_s:.2f} s when there were descriptors again")
    seen = (
        f"/health after {1000 * reached_s:.0f} ms, then within {1000 * max(healthy):.0f} ms, {held} descriptors; "
        f"without any: {busy:.2f} CPUs, {written} bytes of log in {seconds:.0f} s; "
        f"then /health within {1000 * after_s:.0f} ms"
    )
    facts = {
        "reached_s": reached_s,
        "healthy_s": healthy,
        "held": held,
        "busy": busy,
        "written": written,
        "after_s": after_s,
    }
    return Finding(f"{count} silent connections; a limit without a free descriptor", seen, problems, facts)


async def _stream(server: Server, draw: random.Random) -> int:
    """The tokens of a stream that goes on meanwhile."""
    tokens = 0
    async with server.stream(ids(draw, 20), _TOKENS) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
    return tokens


async def _health(server: Server) -> float:
    """Seconds until `/health` answers on a new connection; infinite if it does not."""
    started_s = time.perf_counter()
    try:
        async with server.http.get(f"{server.url}/health", timeout=aiohttp.ClientTimeout(30)) as answer:
            return time.perf_counter() - started_s if answer.status == 200 else float("inf")
    except (aiohttp.ClientError, TimeoutError):
        return float("inf")


async def _exhaust(server: Server, seconds: float) -> tuple[float, int]:
    """CPUs that the server takes while 50 clients connect and no descriptor is free, and bytes that it writes."""
    pid = server.process.pid
    used = _descriptors(server)
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        async with AsyncExitStack() as clients:
            for _ in range(50):
                await clients.enter_async_context(Wire(server.address))
            cpu_s, written = cpu_seconds(pid), _written(pid)
            await asyncio.sleep(seconds)
            return (cpu_seconds(pid) - cpu_s) / seconds, _written(pid) - written
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def _allow(count: int) -> None:
    """Raise this process's own limit to `count` descriptors, where the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def _descriptors(server: Server) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{server.process.pid}/fd")}


def _written(pid: int) -> int:
    """Bytes written to files, which sockets are not."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
