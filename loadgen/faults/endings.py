"""Cases of a killed engine and of a stopped server, under streams."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass

import aiohttp

from loadgen.faults.server import Finding, Server, ids

_TOLD_WITHIN_S = 5.0
# A restart takes no longer than the start, or than this.
_RESTART_S = 5.0


@dataclass
class Stream:
    """The course of one stream.

    Attributes:
        status: of HTTP; 0 without a connection.
        events: number of events.
        end: the last event before `[DONE]`; None if the stream was cut.
        ended_s: its end, by the monotonic clock.
    """

    status: int = 0
    events: int = 0
    end: dict | None = None
    ended_s: float = 0.0

    @property
    def fate(self) -> str:
        """Its end in a word: whole, aborted, told (an error event), refused (503), cut, or without connection."""
        if self.status != 200:
            return {0: "without connection", 503: "refused"}.get(self.status, f"status {self.status}")
        if self.end is None:
            return "cut"
        if "error" in self.end:
            return "told"
        return {"length": "whole", "abort": "aborted"}[self.end["meta_info"]["finish_reason"]["type"]]


async def follow(server: Server, prompt: list[int], tokens: int, stream: Stream) -> None:
    """Read one stream to its end, in whatever way it ends."""
    last = None
    try:
        async with server.stream(prompt, tokens) as answer:
            stream.status = answer.status
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    stream.end = last
                elif line.startswith(b"data: "):
                    last = json.loads(line[6:])
                    stream.events += 1
    except aiohttp.ClientError:
        pass
    stream.ended_s = time.monotonic()


async def kill(server: Server, scale: float, draw: random.Random) -> Finding:
    """`kill -9` of the engine under streams; the server has `--on-engine-death restart`."""
    count = max(int(32 * scale), 4)
    prompt = ids(draw, 40)
    _, before = await server.generate(prompt, 16)
    streams = [Stream() for _ in range(count)]
    tasks = [asyncio.ensure_future(follow(server, ids(draw, 20), 400, stream)) for stream in streams]
    while not all(stream.events or task.done() for stream, task in zip(streams, tasks, strict=True)):
        await asyncio.sleep(0.02)
    killed_s = time.monotonic()
    os.kill(server.engine_pid(), signal.SIGKILL)
    await asyncio.wait(tasks, timeout=60)
    worst = max(stream.ended_s for stream in streams) - killed_s
    fates = Counter(stream.fate for stream in streams)
    lost = count - fates["told"] - fates["whole"]
    while not await server.ready():
        if time.monotonic() > killed_s + 120:
            return Finding("kill -9", "", ["the engine was not restarted"])
        await asyncio.sleep(0.05)
    restart_s = time.monotonic() - killed_s
    problems = await server.problems()
    _, after = await server.generate(prompt, 16)
    if lost:
        problems.append(f"{lost} streams ended without an error event")
    if worst > _TOLD_WITHIN_S:
        problems.append(f"the last client was told after {worst:.1f} s")
    if restart_s > max(server.start_s, _RESTART_S):
        problems.append(f"the restart took {restart_s:.1f} s, the start {server.start_s:.1f} s")
    if before["output_ids"] != after["output_ids"]:
        problems.append("the new engine answers differently")
    told = f"{fates['told']} told within {worst:.2f} s"
    seen = f"{told}; serves again after {restart_s:.1f} s (start: {server.start_s:.1f} s)"
    return Finding(
        f"kill -9 of the engine under {count} streams", seen, problems, {"worst_s": worst, "restart_s": restart_s}
    )


async def drain(server: Server, scale: float, draw: random.Random) -> Finding:
    """SIGTERM under load: accepted requests are served to their end."""
    count = max(int(32 * scale), 4)
    streams: list[Stream] = []
    stopped = False

    async def client() -> None:
        while not stopped:
            stream = Stream()
            streams.append(stream)
            await follow(server, ids(draw, 20), 48, stream)
            if stream.status != 200:
                await asyncio.sleep(0.05)

    tasks = [asyncio.ensure_future(client()) for _ in range(count)]
    while sum(stream.end is not None for stream in streams) < count:
        await asyncio.sleep(0.05)
    told_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(server.process.wait, 120)
    took_s, stopped = time.monotonic() - told_s, True
    await asyncio.wait(tasks, timeout=60)
    accepted = [stream for stream in streams if stream.status == 200]
    whole = sum(stream.fate == "whole" for stream in accepted)
    refused = sum(stream.status == 503 for stream in streams)
    problems = [] if whole == len(accepted) else [f"{len(accepted) - whole} accepted requests were lost"]
    problems += [] if code == 0 else [f"exit code {code}"]
    problems += [f"status {stream.status}" for stream in streams if stream.status not in (0, 200, 503)][:3]
    seen = (
        f"{whole} of {len(accepted)} accepted requests served whole, {refused} refused with 503; "
        f"ended after {took_s:.1f} s with code {code}"
    )
    return Finding(f"SIGTERM under {count} clients", seen, problems, {"accepted": len(accepted), "whole": whole})
