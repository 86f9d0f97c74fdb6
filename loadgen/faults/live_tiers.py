"""A server whose tiers fail while it serves: its answers are right, and what failed is used again."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from loadgen.faults.redis_server import running_redis
from loadgen.faults.server import Server, ids, running_server
from loadgen.http.local_server import free_port
from loadgen.http.relay import Relay

# The pool holds some of the prompts, so that each round evicts, writes and loads.
_OPTIONS = ("--pool-tokens", "1024", "--max-running", "4", "--dtype", "float32", "--on-engine-death", "restart")
# Long enough that a small model on a quick machine takes longer to compute one than to load it.
_PROMPTS, _LENGTH, _NEW = 8, 450, 8
_WAIT_S = 120.0
# A request waits for a store no longer than for a load that hangs, and some time to be computed.
_MOST_ANSWER_S = 30.0


class _Life:
    """Prompts that come again and again, and their answers."""

    def __init__(self, server: Server, draw: random.Random):
        self.server, self._draw = server, draw
        self._prompts = [ids(draw, _LENGTH) for _ in range(_PROMPTS)]
        self._answers: dict[int, list[int]] = {}
        self.problems: list[str] = []

    async def round(self, when: str) -> float:
        """Ask all prompts, in another order, and a new one; seconds of the longest answer."""
        order = [*self._draw.sample(range(_PROMPTS), _PROMPTS), -1]
        asks = (self._ask(when, number) for number in order)
        return max(await asyncio.gather(*asks))

    async def _ask(self, when: str, number: int) -> float:
        prompt = self._prompts[number] if number >= 0 else ids(self._draw, _LENGTH)
        begun = time.monotonic()
        status, answer = await self.server.generate(prompt, _NEW)
        seconds = time.monotonic() - begun
        tokens = answer["output_ids"] if status == 200 else []
        if status != 200 or (number >= 0 and self._answers.setdefault(number, tokens) != tokens):
            self.problems.append(f"{when}: an answer of status {status} is not the first one")
        if seconds > _MOST_ANSWER_S:
            self.problems.append(f"{when}: an answer took {seconds:.1f} s")
        return seconds

    async def counts(self, tier: str) -> dict[str, int]:
        begun = time.monotonic()
        # A server whose engine was killed says that it is ready until it has noticed.
        while "tiers" not in (answer := await self.server.get("/cache/tiers")) and time.monotonic() - begun < _WAIT_S:
            await asyncio.sleep(0.1)
        return dict(answer["tiers"][tier]["counts"])

    async def until(self, tier: str, event: str, when: str) -> float:
        """Rounds until a tier counts more of an event; seconds."""
        before, begun = (await self.counts(tier)).get(event, 0), time.monotonic()
        while time.monotonic() - begun < _WAIT_S:
            await self.round(when)
            if (await self.counts(tier)).get(event, 0) > before:
                return time.monotonic() - begun
        self.problems.append(f"{when}: {tier} counts nothing {event}")
        return _WAIT_S


async def live(options: Sequence[str], draw: random.Random, problems: list[str], store: bool) -> dict[str, str]:
    """Results by treatment. `store`: there is a Redis server to be had."""
    seen: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        disk = ("--disk-cache", str(Path(directory) / "disk"))
        async with running_server([*_OPTIONS, *disk, *options]) as server:
            life = _Life(server, draw)
            await life.until("disk", "hits", "calm")
            parts: dict[str, Callable[[_Life], Awaitable[str]]] = {
                "no room on the disk of a server": _full,
                "a directory that cannot be written, attached to a server": _unwritable,
                "kill -9 of an engine that writes": _killed,
            }
            if store:
                parts["a store of a server that stalls, dies and comes back"] = _store
            for name, part in parts.items():
                before = len(life.problems)
                told = await part(life)
                seen[name] = "; ".join([told, *life.problems[before:]])
            problems += life.problems + await server.problems()
    return seen


async def _full(life: _Life) -> str:
    pid, kind = life.server.engine_pid(), resource.RLIMIT_FSIZE
    limits = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (1 << 14, limits[1]))
    try:
        await life.until("disk", "failed", "a full disk")
    finally:
        resource.prlimit(pid, kind, limits)
    again_s = await life.until("disk", "written", "room again")
    return f"answers right; written again {again_s:.1f} s after there was room"


async def _unwritable(life: _Life) -> str:
    http, url = life.server.http, f"{life.server.url}/cache/tiers/disk"
    async with http.delete(url) as left:
        assert left.status == 200
    async with http.put(url, json={"path": "/proc/ramet", "space": 1}) as refused:
        status, error = refused.status, await refused.json()
    await life.round("no disk")
    # The server may write into it while it vanishes.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        async with http.put(url, json={"path": f"{directory}/disk", "space": 1}) as taken:
            attached = taken.status
        await life.until("disk", "written", "another disk")
    if status != 409 or attached != 200:
        life.problems.append(f"an unusable directory: status {status}; a usable one: {attached}")
    return f"refused with {status}, {error['error']['message']!r}; its directory vanishes later: answers right"


async def _killed(life: _Life) -> str:
    asking = asyncio.gather(*(life.server.generate(ids(random.Random(i), _LENGTH), _NEW) for i in range(8)))
    await asyncio.sleep(0.1)
    os.kill(life.server.engine_pid(), signal.SIGKILL)
    ended = [status for status, _ in await asking]
    begun = time.monotonic()
    while not await life.server.ready() and time.monotonic() - begun < _WAIT_S:
        await asyncio.sleep(0.1)
    await life.until("disk", "hits", "after a kill")
    lost = sum(status != 200 for status in ended)
    return f"{lost} of 8 requests ended with an error; then answers right, and loaded from the disk"


async def _store(life: _Life) -> str:
    http, url = life.server.http, f"{life.server.url}/cache/tiers"
    port = free_port()
    with Relay(port) as way:
        with running_redis(port=port) as redis:
            address: dict[str, Any] = {"address": f"redis://127.0.0.1:{way.port}/0"}
            async with http.delete(f"{url}/disk"), http.put(f"{url}/store", json=address):
                pass
            await life.until("store", "hits", "a store")
            way.bytes_per_s = 0
            stalled_s = await life.round("a store that stalls")
            way.bytes_per_s = None
            redis.process.kill()
            redis.process.wait()
            killed_s = await life.round("a store that died")
        with running_redis(port=port):
            again_s = await life.until("store", "written", "a store that is there again")
    return f"longest answers: {stalled_s:.1f} s and {killed_s:.1f} s; written again after {again_s:.1f} s"
