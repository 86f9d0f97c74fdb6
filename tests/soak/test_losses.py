"""Engines that are killed or frozen under load, disks that fail, and signals in every phase of a server's life."""

import asyncio
import os
import random
import resource
import signal

import pytest

from tests.soak.target import Answer, Target, ids, target

pytestmark = pytest.mark.soak
_POOL = ("--pool-tokens", "4096")
_TOKENS = 300


async def _streams(server: Target, prompts: list[list[int]]) -> list[asyncio.Task[Answer]]:
    """Streams that have all begun, unless they have ended."""
    begun = [asyncio.Event() for _ in prompts]
    tasks = [
        asyncio.create_task(server.follow(prompt, _TOKENS, event)) for prompt, event in zip(prompts, begun, strict=True)
    ]
    waits = [asyncio.create_task(event.wait()) for event in begun]
    for task, wait in zip(tasks, waits, strict=True):
        await asyncio.wait((task, wait), return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
    return tasks


def test_a_frozen_engine_goes_on_or_ends_the_server(tiny_dir, tmp_path):
    draw, bound_s = random.Random(4), 2.0

    async def scenario() -> None:
        async with target(tiny_dir, tmp_path / "log", *_POOL, "--step-timeout", str(bound_s)) as server:
            prompts = [ids(draw, 20) for _ in range(16)]
            expected = [await server.tokens(prompt, _TOKENS) for prompt in prompts]
            engine, pid = server.live.engine_pid(), server.live.process.pid

            async def right(tasks: list[asyncio.Task[Answer]]) -> None:
                assert [(answer.end or {}).get("output_ids") for answer in await asyncio.gather(*tasks)] == expected
                assert server.live.engine_pid() == engine

            tasks = await _streams(server, prompts)
            os.kill(engine, signal.SIGSTOP)
            assert await server.ready(False)
            os.kill(engine, signal.SIGCONT)
            assert await server.ready()
            await right(tasks)

            tasks = await _streams(server, prompts)
            for one in (engine, pid):
                os.kill(one, signal.SIGSTOP)
            await asyncio.sleep(6 * bound_s)
            # The server goes on first, as far behind its clock as its engine.
            for one in (pid, engine):
                os.kill(one, signal.SIGCONT)
                await asyncio.sleep(bound_s / 4)
            await right(tasks)

            tasks = await _streams(server, prompts)
            os.kill(engine, signal.SIGSTOP)
            fates = {answer.fate for answer in await asyncio.gather(*tasks)}
            assert fates <= {"told", "whole"}
            assert await asyncio.to_thread(server.live.process.wait, 120) == 70

    asyncio.run(scenario())


def test_answers_stay_right_while_the_disk_is_full_and_its_engine_is_killed(tiny_dir, tmp_path):
    draw = random.Random(5)
    prompts = [ids(draw, 450) for _ in range(8)]
    answers: dict[int, list[int]] = {}

    async def rounds(server: Target, event: str) -> None:
        """Ask all prompts again and again, until the disk counts more of an event."""

        async def count() -> int:
            return (await server.get("/cache/tiers"))["tiers"]["disk"]["counts"].get(event, 0)

        async def ask(number: int) -> None:
            found = await server.tokens(prompts[number], 8)
            assert answers.setdefault(number, found) == found

        before = await count()
        async with asyncio.timeout(120):
            while await count() == before:
                await asyncio.gather(server.tokens(ids(draw, 450), 8), *map(ask, draw.sample(range(8), 8)))

    async def scenario() -> None:
        small = ("--pool-tokens", "1024", "--max-running", "4")
        options = (*small, "--disk-cache", str(tmp_path / "disk"))
        async with target(tiny_dir, tmp_path / "log", *options) as server:
            await rounds(server, "hits")
            engine, kind = server.live.engine_pid(), resource.RLIMIT_FSIZE
            limits = resource.prlimit(engine, kind)
            resource.prlimit(engine, kind, (1 << 14, limits[1]))
            await rounds(server, "failed")
            resource.prlimit(engine, kind, limits)
            await rounds(server, "written")
            asking = [asyncio.create_task(server.follow(prompt, 8)) for prompt in prompts]
            await asyncio.sleep(0.1)
            os.kill(engine, signal.SIGKILL)
            await asyncio.gather(*asking)
            assert await asyncio.to_thread(server.live.process.wait, 120) == 70
        async with target(tiny_dir, tmp_path / "again", *options) as server:
            await rounds(server, "hits")
            await server.check()

    asyncio.run(scenario())
