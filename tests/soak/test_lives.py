"""Random lives over HTTP: whatever a small server does with requests, it answers as one without a cache."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.soak.target import Target, greedy, ids, scaled, target

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]
_ARRAY = json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 6})
_REUSE = [
    {"method": "a3", "ratio": 0.4}, {"method": "cacheblend", "ratio": 0.4}, {"method": "prophetkv", "ratio": 0.4},
    {"method": "legolink", "k": 5}, {"method": "pie"}, {"method": "none"},
]  # fmt: skip


class Lives:
    """Requests that share prompts and documents.

    Attributes:
        aborted: numbers of the requests that are aborted while they run.
        seen: what a server did to how many requests or, of disk loads and steps ahead, how often.
    """

    def __init__(self, seed: int, count: int):
        self._draw = draw = random.Random(seed)
        self._roots = [ids(draw, 150) for _ in range(6)]
        self._texts = [" ".join(f"{draw.randrange(1000)}" for _ in range(draw.choice([5, 10, 15]))) for _ in range(8)]
        self.bodies = [self._body(number) for number in range(count)]
        self.aborted = set(draw.sample(range(count), count // 8))
        self.seen: Counter[str] = Counter()

    def _body(self, number: int) -> dict[str, Any]:
        """Greedy, sampled, penalised and constrained requests, some with documents or several completions."""
        draw = self._draw
        prompt = draw.choice(self._roots)[: draw.randrange(150)] + ids(draw, draw.randrange(1, 60))
        body = greedy(prompt, draw.randrange(8, 96), priority=draw.choice([0, 0, 0, 1, 5]), rid=f"life-{number}")
        sampling = body["sampling_params"]
        kind = draw.random()
        if kind < 0.2:
            sampling |= {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": draw.randrange(1 << 32)}
        elif kind < 0.3:
            sampling |= {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 7}
        elif kind < 0.4:
            sampling |= {"json_schema": _ARRAY, "temperature": 0.7, "seed": 3, "ignore_eos": False}
        elif kind < 0.65:
            # No question goes on with another, whose choice of rows it would take over.
            parts = [{"document": {"text": text}} for text in draw.sample(self._texts, draw.randrange(1, 4))]
            body["segments"] = [{"text": "Read. "}, *parts, {"text": f" {draw.choice([3, number])}. What is it?"}]
            body["reuse"] = draw.choice(_REUSE)
            if body["reuse"]["method"] != "none":
                body["reuse"] = body["reuse"] | {"granularity": draw.choice(["page", "token"]), "chunk_tokens": 32}
            sampling["max_new_tokens"] = draw.randrange(8, 40)
            del body["input_ids"]
        if draw.random() < 0.15:
            sampling |= {"n": draw.randrange(2, 4), "max_new_tokens": draw.randrange(8, 40), "seed": 5}
        return body

    async def answers(self, server: Target, at_once: int) -> list[list[list[int]]]:
        """The tokens of each completion of each request; of one that is aborted, those that it had."""
        limit = asyncio.Semaphore(at_once)

        async def one(number: int, body: dict[str, Any]) -> list[list[int]]:
            async with limit:
                asked = asyncio.create_task(server.post("/generate", **body))
                if number in self.aborted and at_once > 1:
                    await asyncio.wait([asked], timeout=random.Random(number).random() / 2)
                    await server.post("/abort_request", rid=body["rid"])
                status, answer = await asked
            assert status == 200, (body, answer)
            choices = answer if isinstance(answer, list) else [answer]
            ends = {choice["meta_info"]["finish_reason"]["type"] for choice in choices}
            assert "abort" not in ends or number in self.aborted
            self.seen["aborts"] += "abort" in ends
            reuse = choices[0]["meta_info"].get("reuse", {})
            self.seen["pages"] += reuse.get("granularity") == "page" and bool(reuse["recomputed_rows"])
            self.seen["warm documents"] += reuse.get("strategy") == "fusion" and bool(reuse["reused_tokens"])
            return [choice["output_ids"] for choice in choices]

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(self.bodies)))


def test_answers_are_those_of_a_server_without_a_cache(tiny_dir, tmp_path):
    lives = Lives(7, scaled(1000, least=60))

    async def run(at_once: int, *options: str) -> list[list[list[int]]]:
        async with target(tiny_dir, tmp_path / f"log{at_once}", "--page-size", "4", *options) as server:
            found = await lives.answers(server, at_once)
            state = (await server.get("/server_info"))["state"]
            await server.check()
        if at_once > 1:
            names = {"retractions": "retracted_requests", "disk loads": "tier_loads", "steps ahead": "overlapped_steps"}
            lives.seen |= Counter({name: state[field] for name, field in names.items()})
        return found

    small = ("--pool-tokens", "640", "--max-running", "32", "--overlap", "on", "--debug-invariants")
    found = asyncio.run(run(48, *small, "--disk-cache", str(tmp_path / "disk")))
    seen = dict(lives.seen)
    expected = asyncio.run(run(1, "--no-prefix-cache", "--overlap", "off"))
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for tokens, whole in zip(mine, theirs, strict=True):
            whole = whole[: len(tokens)] if number in lives.aborted else whole
            assert tokens == whole, lives.bodies[number]
    assert {name for name in seen if seen[name] < scaled(20, least=1)} == set(), seen
    assert len(seen) == 6
