"""Random requests on a pool that is far too small, against the same ones, one by one, on a server without a cache."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadgen.faults.server import Finding, Server, ids, running_server

_REQUESTS = 500
_AT_ONCE = 48
_LEAST_RETRACTIONS = 100
_POOL_TOKENS = 640
_SCHEMA = json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 6})


def _requests(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Bodies for `/generate`; `leave_after`: events after which the client aborts, not to be sent."""
    roots = [ids(draw, 150) for _ in range(6)]
    made = []
    for _ in range(count):
        prompt = draw.choice(roots)[: draw.randrange(150)] + ids(draw, draw.randrange(1, 60))
        sampling: dict[str, Any] = {"max_new_tokens": draw.randrange(8, 128), "temperature": 0}
        kind = draw.random()
        if kind < 0.3:
            sampling |= {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": draw.randrange(1 << 32)}
        elif kind < 0.4:
            sampling |= {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 7}
        elif kind < 0.5:
            sampling |= {"json_schema": _SCHEMA, "temperature": 0.7, "seed": draw.randrange(1 << 32)}
        sampling["ignore_eos"] = "json_schema" not in sampling
        if draw.random() < 0.15:
            sampling |= {"n": draw.randrange(2, 4), "max_new_tokens": draw.randrange(8, 40), "seed": draw.randrange(99)}
        body = {"input_ids": prompt, "sampling_params": sampling, "priority": draw.choice([0, 0, 0, 1, 5])}
        leaves = draw.random() < 0.1 and "n" not in sampling
        made.append(body | ({"leave_after": draw.randrange(1, 30), "stream": True} if leaves else {}))
    return made


async def retraction(options: Sequence[str], scale: float, draw: random.Random) -> Finding:
    """Equal answers in float32, however often the requests were retracted."""
    bodies = _requests(draw, max(int(_REQUESTS * scale), 20))
    common = ["--dtype", "float32", "--grammar-timeout", "60", *options]
    small = ("--pool-tokens", str(_POOL_TOKENS), "--page-size", "4", "--max-running", "32", "--debug-invariants")
    async with running_server([*common, *small]) as server:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(body: dict[str, Any]) -> list[list[int]]:
            async with limit:
                return await _answer(server, body)

        found = await asyncio.gather(*map(one, bodies))
        retracted = _counter(await _metrics(server), "vllm:num_preemptions_total")
        problems = await server.problems()
    async with running_server([*common, "--no-prefix-cache"]) as server:
        expected = [await _answer(server, {**body, "leave_after": None}) for body in bodies]
        problems += await server.problems()
    differ = sum(
        not _agree(one, other, "leave_after" in body) for one, other, body in zip(found, expected, bodies, strict=True)
    )
    left = sum("leave_after" in body for body in bodies)
    problems += [f"{differ} of {len(bodies)} requests are answered differently"] if differ else []
    least = min(_LEAST_RETRACTIONS, len(bodies) // 5)
    problems += [f"only {retracted} retractions, {least} are wanted"] if retracted < least else []
    kinds = Counter(_kind(body["sampling_params"]) for body in bodies)
    tokens = sum(len(choice) for answer in found for choice in answer)
    seen = f"{retracted} retractions, {tokens} tokens, {differ} answers differ; " + ", ".join(
        f"{count} {kind}" for kind, count in kinds.items()
    )
    facts = {"retractions": retracted, "differ": differ, "tokens": tokens, "aborted": left}
    done = f"{len(bodies)} random requests on a pool of {_POOL_TOKENS} tokens, {left} of them aborted, in float32"
    return Finding(done, seen, problems, facts)


def _kind(sampling: dict[str, Any]) -> str:
    if "n" in sampling:
        return "with n > 1"
    if "json_schema" in sampling:
        return "with a schema"
    return "sampled" if sampling["temperature"] else "greedy"


def _agree(found: list[list[int]], expected: list[list[int]], left: bool) -> bool:
    """Whether answers are equal; that of a client that left begins as it would have gone on."""
    if left:
        return bool(found[0]) and expected[0][: len(found[0])] == found[0]
    return found == expected


async def _answer(server: Server, body: dict[str, Any]) -> list[list[int]]:
    """The output ids of each completion. Raises RuntimeError."""
    body = dict(body)
    leave_after = body.pop("leave_after", None)
    if leave_after is None:
        status, answer = await server.post("/generate", **{**body, "stream": False})
        if status != 200:
            raise RuntimeError(f"a request is answered with {status}: {answer}")
        return [one["output_ids"] for one in (answer if isinstance(answer, list) else [answer])]
    last: dict[str, Any] = {"output_ids": []}
    async with server.http.post(f"{server.url}/generate", json=body) as stream:
        async for line in stream.content:
            if line.startswith(b"data: {"):
                last, leave_after = json.loads(line[6:]), leave_after - 1
            if not leave_after:
                break
    return [last["output_ids"]]


async def _metrics(server: Server) -> str:
    async with server.http.get(f"{server.url}/metrics") as answer:
        return await answer.text()


def _counter(metrics: str, name: str) -> int:
    return int(sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(name)))
