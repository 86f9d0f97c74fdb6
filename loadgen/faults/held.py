"""The number of open streams that a server holds without errors and without slowing down the running ones."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp

from loadgen.faults.server import Finding, Server, ids
from loadgen.http.summary import spread

_LEVELS = (128, 256, 512, 1000)
_SLOWER = 2.0
_TOKENS = 32


async def held(server: Server, scale: float, draw: random.Random) -> Finding:
    """Closed loops of more and more streams, compared with the saturated batch (`--max-running`)."""
    saturated = (await server.get("/server_info"))["config"]["scheduler"]["max_running"]
    levels = [level for level in _LEVELS if level <= max(1000 * scale, 128)]
    await server.warm_up(draw)
    await _level(server, saturated, draw)
    base, errors = await _level(server, saturated, draw)
    problems = list(errors)
    facts: dict[str, Any] = {"saturation": {"streams": saturated, "itl_p99_s": base}}
    best, seen = 0, []
    for level in levels:
        p99, errors = await _level(server, level, draw)
        facts[str(level)] = {"itl_p99_s": p99, "errors": len(errors)}
        seen.append(f"{level}: {1000 * p99:.0f} ms")
        if errors or p99 > _SLOWER * base:
            seen[-1] += f" ({len(errors)} errors)" if errors else " (too slow)"
            break
        best = level
    problems += await server.problems()
    if not best:
        problems.append("not even the lowest level holds")
    text = f"{best} streams hold; ITL p99 {1000 * base:.0f} ms at {saturated} streams, {', '.join(seen)}"
    return Finding(f"closed loops of up to {levels[-1]} streams", text, problems, facts)


async def _level(server: Server, streams: int, draw: random.Random) -> tuple[float, list[str]]:
    """The 99th percentile of the time between two events of a stream, in seconds, and the errors."""
    gaps: list[float] = []
    errors: list[str] = []
    rounds = 2

    async def client() -> None:
        for _ in range(rounds):
            done = False
            last_s = None
            try:
                async with server.stream(ids(draw, 16), _TOKENS) as answer:
                    async for line in answer.content:
                        if not line.startswith(b"data: "):
                            continue
                        now_s = time.perf_counter()
                        done = done or line.startswith(b"data: [DONE]")
                        if last_s is not None and not done:
                            gaps.append(now_s - last_s)
                        last_s = now_s
                if not done or answer.status != 200:
                    errors.append(f"status {answer.status}, done: {done}")
            except (aiohttp.ClientError, TimeoutError) as error:
                errors.append(repr(error))

    await asyncio.gather(*(client() for _ in range(streams)))
    times = spread(gaps)
    return (times["p99"] if times else float("inf")), errors
