"""Mixed load for a long time: streams, aborts, flushes, pins, grammars; no wrong answer, no leak."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp

from loadgen.faults.server import MEMORY_SHARE, Finding, Server, ids
from loadgen.faults.ties import TIE_NATS, apart, shortfall

_SECONDS = 1200
_KNOWN = 24
_CLIENTS = 24
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


class _Soak:
    def __init__(self, server: Server, draw: random.Random):
        self.server = server
        self.draw = draw
        self.roots = [ids(draw, 200) for _ in range(4)]
        self.known: list[tuple[list[int], list[int]]] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.others: list[tuple[list[int], list[int], list[int]]] = []
        self.apart: list[float] = []
        self.again: list[float] = []
        self.pins: list[str] = []

    async def learn(self) -> None:
        """Collect answers of the idle server, one after the other."""
        for _ in range(_KNOWN):
            prompt = self.draw.choice(self.roots)[: self.draw.randrange(200)] + ids(
                self.draw, self.draw.randrange(1, 80)
            )
            _, answer = await self.server.generate(prompt, 24)
            self.known.append((prompt, answer["output_ids"]))

    async def client(self, until_s: float) -> None:
        kinds = {
            self._check: 50, self._check_stream: 20, self._leave: 15, self._abort: 6,
            self._constrain: 4, self._expire: 3, self._flush: 1, self._pin: 2,
        }  # fmt: skip
        while time.monotonic() < until_s:
            (kind,) = self.draw.choices(list(kinds), weights=list(kinds.values()))
            try:
                await kind()
                self.done[kind.__name__.strip("_").replace("_", " ")] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")

    def _compare(self, prompt: list[int], expected: list[int], found: Any, how: str) -> None:
        if isinstance(found, list) and len(found) == len(expected):
            if found != expected:
                self.others.append((prompt, expected, found))
        else:
            self.wrong.append(f"{how}: {found} instead of {expected}")

    async def judge(self) -> None:
        """Score the unexpected answers on the server, which is idle now; in float32 all of them are wrong."""
        exact = (await self.server.get("/model_info"))["dtype"] == "float32"
        for prompt, expected, found in self.others:
            nats = await apart(self.server, prompt, expected, found)
            self.apart.append(nats)
            if exact or nats > TIE_NATS:
                self.wrong.append(f"{found} instead of {expected}, {nats:.3f} nats apart")
        self.again = [await shortfall(self.server, prompt, expected) for prompt, expected in self.known]

    async def _check(self) -> None:
        prompt, expected = self.draw.choice(self.known)
        status, answer = await self.server.generate(prompt, 24)
        self._compare(prompt, expected, answer.get("output_ids") if status == 200 else (status, answer), "whole")

    async def _check_stream(self) -> None:
        prompt, expected = self.draw.choice(self.known)
        last: dict[str, Any] = {}
        async with self.server.stream(prompt, 24) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
        self._compare(prompt, expected, last.get("output_ids", last), "stream")

    async def _leave(self) -> None:
        prompt = self.draw.choice(self.roots)[: self.draw.randrange(1, 200)] + ids(self.draw, self.draw.randrange(300))
        async with self.server.stream(prompt, 200) as answer:
            await answer.content.read(self.draw.randrange(1, 4000))

    async def _abort(self) -> None:
        rid = f"soak-{self.draw.randrange(1 << 60)}"
        async with self.server.stream(ids(self.draw, 50), 300, rid=rid) as answer:
            await answer.content.readline()
            await self.server.post("/abort_request", rid=rid)
            text = await answer.content.read()
        if b'"abort"' not in text or b"[DONE]" not in text:
            self.wrong.append(f"abort: {text[-200:]!r}")

    async def _constrain(self) -> None:
        sampling = {"json_schema": _SCHEMA, "max_new_tokens": 60, "temperature": 1.0}
        status, answer = await self.server.post("/generate", text="JSON: ", sampling_params=sampling)
        ended = answer["meta_info"]["finish_reason"]["type"] == "stop" if status == 200 else False
        if status != 200 or (ended and json.loads(answer["text"]).keys() != {"a", "b"}):
            self.wrong.append(f"schema: {answer}")

    async def _expire(self) -> None:
        status, answer = await self.server.generate(ids(self.draw, 30), 800, timeout_s=self.draw.random() + 0.05)
        if status != 408:
            self.wrong.append(f"deadline: {status} {str(answer)[:200]}")

    async def _flush(self) -> None:
        await self.server.post("/flush_cache")

    async def _pin(self) -> None:
        if len(self.pins) > 3:
            async with self.server.http.delete(f"{self.server.url}/cache/pins/{self.pins.pop()}"):
                return
        status, pin = await self.server.post("/cache/pin", input_ids=self.draw.choice(self.roots), ttl_s=60)
        if status == 200:
            self.pins.append(pin["id"])
        elif status != 409:
            self.wrong.append(f"pin: {status} {pin}")


async def soak(server: Server, scale: float, draw: random.Random) -> Finding:
    """Twenty minutes of mixed load; the server's pool is too small for it."""
    seconds = max(_SECONDS * scale, 8)
    await server.warm_up(draw)
    run = _Soak(server, draw)
    await run.learn()
    started_s = time.monotonic()
    # Growth within the first tenth of the time is no leak.
    await asyncio.gather(*(run.client(started_s + seconds / 10) for _ in range(_CLIENTS)))
    memory = [server.memory()]
    for _ in range(9):
        part_s = time.monotonic() + seconds / 10
        await asyncio.gather(*(run.client(part_s) for _ in range(_CLIENTS)))
        memory.append(server.memory())
    await server.post("/flush_cache?pins=true")
    await run.judge()
    problems = run.wrong[:5] + ([f"{len(run.wrong)} wrong answers in all"] if run.wrong else [])
    problems += await server.problems()
    problems += [
        f"the {name} grew from {memory[0][name]:.0f} to {memory[-1][name]:.0f} MiB"
        for name in memory[0]
        if memory[-1][name] > memory[0][name] * (1 + MEMORY_SHARE)
    ]
    state = await server.state()
    grown = ", ".join(f"{name} {memory[0][name]:.0f} to {memory[-1][name]:.0f} MiB" for name in memory[0])
    compared = run.done["check"] + run.done["check stream"]
    seen = (
        f"{sum(run.done.values())} requests, {compared} greedy answers compared, {len(run.wrong)} wrong, "
        f"{len(run.others)} others than the idle server's, up to {max(run.apart, default=0):.3f} nats apart "
        f"(its own, read again: {max(run.again):.3f}); "
        f"{state['retracted_requests']} retractions, {state['evicted_tokens']} tokens evicted; {grown}"
    )
    facts = {"done": dict(run.done), "memory_mib": memory, "wrong": len(run.wrong), "seconds": seconds}
    facts |= {"apart_nats": sorted(run.apart), "again_nats": sorted(run.again)}
    return Finding(f"{seconds / 60:.1f} minutes of mixed load, aborts, flushes and pins", seen, problems, facts)
