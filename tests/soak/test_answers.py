"""Right answers under a long mixed load."""

import asyncio
import json
import random
import time
from collections import Counter

import aiohttp
import pytest

from tests.soak.target import SCALE, Target, greedy, ids, target

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
_CLIENTS = 24
_OBJECT = {"a": {"type": "integer"}, "b": {"type": "boolean"}}
_SCHEMA = {"type": "object", "properties": _OBJECT, "required": ["a", "b"], "additionalProperties": False}


class Mixed:
    """Clients that do one of several things at random; `wrong` has every answer that is not as it should be."""

    def __init__(self, server: Target, draw: random.Random):
        self.server, self.draw = server, draw
        self.roots = [ids(draw, 200) for _ in range(4)]
        self.known: list[tuple[list[int], list[int]]] = []
        self.pins: list[str] = []
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def learn(self) -> None:
        """Collect answers of the idle server, one after the other."""
        for _ in range(24):
            prompt = self.draw.choice(self.roots)[: self.draw.randrange(200)] + ids(self.draw, 40)
            self.known.append((prompt, await self.server.tokens(prompt, 24)))

    async def client(self, until_s: float) -> None:
        kinds = {
            self.whole: 50, self.stream: 20, self.leave: 15, self.abort: 6, self.constrain: 4, self.expire: 3,
            self.flush: 1, self.pin: 2,
        }  # fmt: skip
        while time.monotonic() < until_s:
            (kind,) = self.draw.choices(list(kinds), weights=list(kinds.values()))
            try:
                await kind()
                self.done[kind.__name__] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")

    async def whole(self) -> None:
        prompt, expected = self.draw.choice(self.known)
        self.expect("whole", await self.server.tokens(prompt, 24) == expected)

    async def stream(self) -> None:
        prompt, expected = self.draw.choice(self.known)
        answer = await self.server.follow(prompt, 24)
        self.expect("stream", answer.end is not None and answer.end.get("output_ids") == expected)

    async def leave(self) -> None:
        prompt = self.draw.choice(self.roots)[: self.draw.randrange(1, 200)] + ids(self.draw, self.draw.randrange(300))
        async with self.server.http.post(f"{self.server.url}/generate", json=greedy(prompt, 200, stream=True)) as it:
            await it.content.read(self.draw.randrange(1, 4000))

    async def abort(self) -> None:
        rid = f"soak-{self.draw.randrange(1 << 60)}"
        body = greedy(ids(self.draw, 50), 300, rid=rid, stream=True)
        async with self.server.http.post(f"{self.server.url}/generate", json=body) as answer:
            await answer.content.readline()
            await self.server.post("/abort_request", rid=rid)
            text = await answer.content.read()
        self.expect("abort", b"[DONE]" in text)

    async def constrain(self) -> None:
        sampling = {"json_schema": json.dumps(_SCHEMA), "max_new_tokens": 60, "temperature": 1.0}
        status, answer = await self.server.post("/generate", text="JSON: ", sampling_params=sampling)
        ended = status == 200 and answer["meta_info"]["finish_reason"]["type"] == "stop"
        self.expect("schema", status == 200 and (not ended or json.loads(answer["text"]).keys() == _OBJECT.keys()))

    async def expire(self) -> None:
        body = greedy(ids(self.draw, 30), 400, timeout_s=0.01 + self.draw.random() / 20)
        status, _ = await self.server.post("/generate", **body)
        self.expect("deadline", status in (200, 408))

    async def flush(self) -> None:
        await self.server.post("/flush_cache")

    async def pin(self) -> None:
        if len(self.pins) > 3:
            async with self.server.http.delete(f"{self.server.url}/cache/pins/{self.pins.pop()}"):
                return
        status, pin = await self.server.post("/cache/pin", input_ids=self.draw.choice(self.roots), ttl_s=60)
        if status == 200:
            self.pins.append(pin["id"])
        self.expect("pin", status in (200, 409))

    def expect(self, what: str, is_right: bool) -> None:
        if not is_right:
            self.wrong.append(what)


def test_twenty_minutes_of_mixed_load_without_a_wrong_answer_or_a_leak(tiny_dir, tmp_path):
    """The pool is too small for the load, so that requests are retracted."""

    async def scenario() -> None:
        small = ("--pool-tokens", "1024", "--max-running", "20", "--debug-invariants")
        async with target(tiny_dir, tmp_path / "log", *small) as server:
            run = Mixed(server, random.Random(6))
            await server.warm_up(run.draw)
            await run.learn()
            before = None
            # Growth within the first tenth of the time is no leak.
            for part in (0.1, 0.9):
                before = server.memory() if part == 0.9 else None
                until_s = time.monotonic() + max(1200 * SCALE, 8) * part
                await asyncio.gather(*(run.client(until_s) for _ in range(_CLIENTS)))
            await server.post("/flush_cache?pins=true")
            assert Counter(run.wrong) == {}
            assert min(run.done["whole"], run.done["stream"]) > 0
            await server.check(before)

    asyncio.run(scenario())
