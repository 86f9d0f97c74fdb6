"""Clients that leave, reset, stall, and send damaged bodies."""

import asyncio
import json
import random

import pytest

from tests.soak.target import Target, post, read, reset, scaled, target

pytestmark = pytest.mark.soak
_AT_ONCE = 32
_POOL = ("--pool-tokens", "4096", "--debug-invariants")


def test_damaged_bodies_are_client_errors_and_no_stream_lacks_its_end(tiny_dir, tmp_path):
    draw = random.Random(2)
    problems: list[str] = []

    async def one(server: Target, own: random.Random) -> None:
        path, body = _damaged(own)
        async with asyncio.timeout(120), server.wire() as wire:
            problem = await _send(wire, post(path, body), own)
        if problem:
            problems.append(f"{problem}: {path} {body[:300]!r}")

    async def scenario() -> None:
        async with target(tiny_dir, tmp_path / "log", *_POOL, "--max-output-tokens", "64") as server:
            await server.warm_up(draw)
            await _many(scaled(500), draw, lambda own: one(server, own))
            before = server.memory()
            await _many(scaled(2000), draw, lambda own: one(server, own))
            assert problems == []
            await server.check(before)

    asyncio.run(scenario())


async def _many(count: int, draw: random.Random, call) -> None:
    """Calls with random numbers of their own, some at once."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(seed: int) -> None:
        async with limit:
            await call(random.Random(seed))

    await asyncio.gather(*(one(draw.randrange(1 << 60)) for _ in range(count)))


_CONTROL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_ASKED = {"role": "user", "content": [{"type": "text", "text": "Plant one.", **_CONTROL}]}
_CALL = {"type": "tool_use", "id": "toolu_1", "name": "plant", "input": {"n": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "It grows."}]}
_TOOL = {"name": "plant", "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}, **_CONTROL}
_BODIES: dict[str, list[dict]] = {
    "/v1/messages": [
        {"max_tokens": 4, "system": "Be brief.", "messages": [_ASKED], "stop_sequences": ["a"], "cache_control": None},
        {"max_tokens": 8, "messages": [_ASKED], "tools": [_TOOL], "tool_choice": {"type": "any"}, "stream": True},
        {
            "max_tokens": 4,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
            "messages": [
                _ASKED,
                {"role": "assistant", "content": [_CALL]},
                {"role": "user", "content": [_RESULT]},
                {"role": "assistant", "content": "It is"},
            ],
        },
    ],
    "/generate": [
        {"text": "Once", "sampling_params": {"max_new_tokens": 4, "stop": ["a", "é"], "logit_bias": {"5": -1}}},
        {"input_ids": [[1, 2, 3], [4]], "sampling_params": [{"n": 2, "max_new_tokens": 2}, {"max_new_tokens": 1}]},
        {"text": ["a", "b"], "rid": ["x", "y"], "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        {"text": "JSON:", "sampling_params": {"json_schema": '{"type": "object"}', "max_new_tokens": 8}},
        {"text": "x", "sampling_params": {"regex": "[a-z]{2,5}(x|y)*", "max_new_tokens": 8, "temperature": 1.5}},
        {"text": "x", "stream": True, "timeout_s": 20, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}},
    ],
}
_WORDS = [
    b"null", b"true", b"-1", b"1e999", b"NaN", b'"\\ud800"', b"[]", b"{}", b"[[[[", b"0", b"99999999999999999999",
    b'"stream": true,', b'"n": 64', b'"max_new_tokens": 0', b"\xff\xfe", b"\x00", b"\\u0000", b'"', b"\\", b",,",
    b'"temperature": 1e-300', b'"top_p": 1e-9', b'"min_p": 1', b'"regex": "(a|b)*"', b"\xf0\x9f\x8c\xb1",
]  # fmt: skip
# Last events of streams, by the routes' kinds.
_ENDS = (b"data: [DONE]", b"event: message_stop", b"event: error")


def _damaged(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body for it that is damaged."""
    path = draw.choice(list(_BODIES))
    data = bytearray(json.dumps(draw.choice(_BODIES[path])).encode())
    for _ in range(draw.choice([0, 1, 1, 2, 4, 8])):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at:at] = draw.choice(_WORDS)
            case 2:
                del data[at : at + draw.randrange(1, 12)]
            case 3:
                data[at : at + draw.randrange(1, 20)] = draw.choice(_WORDS)
            case _:
                other = json.dumps(draw.choice(_BODIES[path])).encode()
                start = draw.randrange(len(other))
                data[at:at] = other[start : start + draw.randrange(1, 40)]
    return path, bytes(data)


async def _send(wire, data: bytes, draw: random.Random) -> str:
    """Send a body in a random way; the problem of the answer, or an empty text."""
    loop, way = asyncio.get_running_loop(), draw.choice(["whole", "whole", "pieces", "cut", "reset", "stall"])
    if way == "pieces":
        for at in range(0, len(data), 50):
            await loop.sock_sendall(wire, data[at : at + 50])
            await asyncio.sleep(0)
    else:
        await loop.sock_sendall(wire, data if way != "cut" else data[: draw.randrange(len(data))])
    if way in ("cut", "reset", "stall"):
        if way != "cut":
            await read(wire, 1)
        if way == "reset":
            reset(wire)
        return ""
    return _problem(await read(wire))


def _problem(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode(errors="replace")
    if not status.isdigit() or status >= "500":
        return f"answered {head[:40]!r}"
    if status >= "400":
        try:
            return "" if set(json.loads(body)["error"]) == {"message", "type", "param", "code"} else "wrong schema"
        except (ValueError, LookupError, TypeError):
            return f"not in the error schema: {body[:100]!r}"
    return "a stream without its end" if b"event-stream" in head and not any(end in body for end in _ENDS) else ""
