"""An engine that does not go on: stopped for a while, stopped with its server, stopped for good."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

from loadgen.faults.endings import Stream, follow
from loadgen.faults.server import Finding, Server, ids

_TOKENS = 200


async def frozen(server: Server, scale: float, draw: random.Random) -> Finding:
    """SIGSTOP and SIGCONT under streams; the server has `--step-timeout` and `--on-engine-death restart`."""
    prompts = [ids(draw, 20) for _ in range(max(int(16 * scale), 4))]
    bound_s = (await server.get("/server_info"))["config"]["engine"]["step_timeout"]
    expected = [(await server.generate(prompt, _TOKENS))[1]["output_ids"] for prompt in prompts]
    engine, problems, wrong_ones = server.engine_pid(), [], 0

    async def compare(streams: list[Stream], tasks: list[asyncio.Task[None]], after: str) -> None:
        nonlocal wrong_ones
        await asyncio.wait(tasks, timeout=120)
        wrong = sum(
            (stream.end or {}).get("output_ids") != ids_ for stream, ids_ in zip(streams, expected, strict=True)
        )
        wrong_ones += wrong
        if wrong:
            problems.append(f"{wrong} wrong answers after {after}: {dict(Counter(stream.fate for stream in streams))}")
        if server.engine_pid() != engine:
            problems.append(f"the engine was ended after {after}")

    streams, tasks = await _streams(server, prompts)
    os.kill(engine, signal.SIGSTOP)
    said_no_s = await _wait_ready(server, False, 4 * bound_s)
    os.kill(engine, signal.SIGCONT)
    said_yes_s = await _wait_ready(server, True, 4 * bound_s)
    await compare(streams, tasks, "a freeze of the engine")

    streams, tasks = await _streams(server, prompts)
    for pid in (engine, server.process.pid):
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(6 * bound_s)
    # The server goes on first, as far behind its clock as its engine.
    for pid in (server.process.pid, engine):
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(bound_s / 4)
    await compare(streams, tasks, "a suspension of both")

    streams, tasks = await _streams(server, prompts)
    os.kill(engine, signal.SIGSTOP)
    started_s = time.monotonic()
    await asyncio.wait(tasks, timeout=10 * bound_s)
    told_s = max((stream.ended_s for stream in streams), default=0) - started_s
    fates = Counter(stream.fate for stream in streams)
    if fates["told"] + fates["whole"] < len(streams):
        problems.append(f"ends of the streams of a frozen engine: {dict(fates)}")
    again_s = await _wait_ready(server, True, 60)
    problems += [] if again_s < 60 else ["the engine was not restarted"]
    problems += [] if max(said_no_s, said_yes_s) < 4 * bound_s else ["/ready did not follow the engine"]
    problems += await server.problems()
    seen = (
        f"/ready said no after {said_no_s:.1f} s and yes {said_yes_s:.1f} s after the engine went on; "
        f"{wrong_ones} wrong answers; frozen for good: {fates['told']} told after {told_s:.1f} s, "
        f"ready again {again_s:.1f} s later"
    )
    facts = {"bound_s": bound_s, "said_no_s": said_no_s, "told_s": told_s, "again_s": again_s}
    done = f"SIGSTOP of the engine under {len(prompts)} streams, for a while, with its server, for good"
    return Finding(f"{done} (--step-timeout {bound_s:g})", seen, problems, facts)


async def _streams(server: Server, prompts: list[list[int]]) -> tuple[list[Stream], list[asyncio.Task[None]]]:
    """Streams that have begun."""
    streams = [Stream() for _ in prompts]
    tasks = [
        asyncio.create_task(follow(server, prompt, _TOKENS, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    while not any(stream.events for stream in streams):
        await asyncio.sleep(0.01)
    return streams, tasks


async def _wait_ready(server: Server, wanted: bool, most_s: float) -> float:
    """Seconds until `/ready` says yes or no; `most_s` if it does not."""
    started_s = time.monotonic()
    while await server.ready() != wanted and time.monotonic() - started_s < most_s:
        await asyncio.sleep(0.02)
    return min(time.monotonic() - started_s, most_s)
