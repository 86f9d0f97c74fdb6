"""Cases of clients that leave, that do not read, and that send too much."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter

from loadgen.faults.server import Finding, Server, Wire, ids, request

_AT_ONCE = 32
# The median, which a busy machine hardly moves, and the longest time of all.
_REFUSED_WITHIN_S, _REFUSED_AT_LAST_S = 0.05, 0.5


async def storm(server: Server, scale: float, draw: random.Random) -> Finding:
    """Streams that are opened and cut at random points, half of them with a reset."""
    count = max(int(500 * scale), 8)
    await server.warm_up(draw)
    roots = [ids(draw, 120) for _ in range(8)]
    await _cut_streams(server, roots, count // 5, draw)
    before = server.memory()
    aborted = (await server.state())["aborted_requests"]
    await _cut_streams(server, roots, count, draw)
    problems = await server.problems(before)
    state, after = await server.state(), server.memory()
    seen = f"{state['aborted_requests'] - aborted} requests aborted; {_memory(before, after)}"
    facts = {"memory_before_mib": before, "memory_after_mib": after}
    return Finding(f"{count} streams opened and cut at random points", seen, problems, facts)


async def _cut_streams(server: Server, roots: list[list[int]], count: int, draw: random.Random) -> None:
    limit = asyncio.Semaphore(_AT_ONCE)

    async def cut(seed: int) -> None:
        own = random.Random(seed)
        prompt = own.choice(roots)[: own.randrange(1, 120)] + ids(own, own.randrange(0, 60))
        sampling = {"max_new_tokens": 100, "ignore_eos": True, "n": own.choice([1, 1, 1, 2])}
        async with limit, Wire(server.address) as wire:
            await wire.send(request({"input_ids": prompt, "stream": True, "sampling_params": sampling}))
            left = own.choice([0, 1, own.randrange(20_000)])
            while left > 0 and (part := await wire.receive(min(left, 4096))):
                left -= len(part)
            await asyncio.sleep(own.choice([0, 0, own.random() / 4]))
            if own.random() < 0.5:
                wire.reset()

    await asyncio.gather(*(cut(draw.randrange(1 << 30)) for _ in range(count)))


async def slow(server: Server, scale: float, draw: random.Random) -> Finding:
    """Clients that ask for much and read nothing; the server has `--client-timeout 3`."""
    count = max(int(50 * scale), 4)
    await server.warm_up(draw)
    # Each event repeats the text so far, with the alternatives of each token.
    sampling = {"max_new_tokens": 256, "ignore_eos": True}
    body = {"stream": True, "return_logprob": True, "top_logprobs_num": 64, "sampling_params": sampling}

    async def one_round() -> list[bytes]:
        asked = [request({**body, "input_ids": ids(draw, 30)}) for _ in range(count)]
        return await asyncio.gather(*(_unread(server, data) for data in asked))

    # Buffers of unread answers are kept for the next ones: no leak, but more than at the start.
    await one_round()
    before = server.memory()
    answers = await one_round()
    cut = sum(b"[DONE]" not in answer for answer in answers)
    problems = await server.problems(before)
    if cut < count:
        problems.append(f"{count - cut} clients that did not read were served to the end")
    seen = f"{cut} of {count} cut; {_memory(before, server.memory())}"
    return Finding(f"{count} clients that do not read", seen, problems, {"cut": cut})


async def _unread(server: Server, data: bytes) -> bytes:
    """Read the buffers once the server has given up on a client that read nothing."""
    async with Wire(server.address, receive_buffer=4096) as wire:
        await wire.send(data)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            await asyncio.sleep(1)
            state = await server.state()
            if not state["running"] and not state["waiting"]:
                break
        # The last requests have just ended; their connections have the timeout of all others.
        await asyncio.sleep(4)
        return await wire.receive_all()


async def large(server: Server, scale: float, draw: random.Random) -> Finding:
    """Bodies that are too large, too deep or have too many elements, and the time until they are refused."""
    rounds = max(int(20 * scale), 5)
    await server.warm_up(draw)
    before: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    problems = []
    bodies = _refused()
    for number, (name, data, expected) in enumerate(bodies * (1 + rounds)):
        if number == len(bodies):  # the first of each size widens the heap
            before = server.memory()
        async with Wire(server.address) as wire:
            head, _, body = data.partition(b"\r\n\r\n")
            await wire.send(head + b"\r\n\r\n")
            if name != "too large":
                await wire.send(body)
            asked_s = time.perf_counter()
            answer = await asyncio.wait_for(wire.receive(), 30)
            times.setdefault(name, []).append(time.perf_counter() - asked_s)
            if f" {expected} ".encode() not in answer[:20]:
                problems.append(f"{name}: {answer[:60]!r}")
    worst = {name: max(values) for name, values in times.items()}
    for name, values in times.items():
        if statistics.median(values) > _REFUSED_WITHIN_S or worst[name] > _REFUSED_AT_LAST_S:
            problems.append(f"{name}: refused after {', '.join(f'{1000 * value:.0f}' for value in values)} ms")
    problems += await server.problems(before)
    seen = "refused within " + ", ".join(f"{1000 * seconds:.0f} ms ({name})" for name, seconds in worst.items())
    total = sum(map(len, times.values()))
    return Finding(f"{total} bodies too large, too deep, with too many elements", seen, problems, {"worst_s": worst})


def _refused() -> list[tuple[str, bytes, int]]:
    """Name, bytes and status of the bodies; the default limit is 8 MiB."""
    mega = 1 << 20
    bias = {str(i): 1 for i in range(5000)}
    return [
        ("too large", request(b"x" * (9 * mega)), 413),
        ("deep lists", request(b"[" * (2 * mega)), 400),
        ("deep objects", request(b'{"a":' * (mega // 5)), 400),
        ("many stop strings", request({"text": "x", "sampling_params": {"stop": ["a"] * 100_000}}), 400),
        ("a large bias", request({"text": "x", "sampling_params": {"logit_bias": bias}}), 400),
        ("a long expression", request({"text": "x", "sampling_params": {"regex": "a" * 10_000}}), 400),
        ("many completions", request({"text": "x", "sampling_params": {"n": 10**9}}), 400),
        ("a number of 4,000 digits", request(b'{"text": "x", "priority": ' + b"9" * 4000 + b"}"), 400),
    ]


async def fuzz(server: Server, scale: float, draw: random.Random) -> Finding:
    """Bodies with random damage, and clients that cut, stall and reset."""
    count = max(int(2000 * scale), 20)
    await server.warm_up(draw)
    statuses: Counter[str] = Counter()
    problems: list[str] = []
    limit = asyncio.Semaphore(_AT_ONCE)

    async def one(seed: int) -> None:
        own = random.Random(seed)
        path, data = _damaged(own)
        async with limit:
            try:
                status, problem = await asyncio.wait_for(_send(server, request(data, path), own), 120)
            except TimeoutError:
                status, problem = "none", "no answer within 120 s"
        statuses[status] += 1
        if problem:
            problems.append(f"{problem}: {path} {data[:300]!r}")

    await asyncio.gather(*(one(draw.randrange(1 << 60)) for _ in range(count // 4)))
    before = server.memory()
    await asyncio.gather(*(one(draw.randrange(1 << 60)) for _ in range(count)))
    problems = problems[:5] + await server.problems(before)
    answers = ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    seen = f"{answers}; {_memory(before, server.memory())}"
    return Finding(f"{count + count // 4} damaged bodies and misbehaving streams", seen, problems, dict(statuses))


_CONTROL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_ASKED = {"role": "user", "content": [{"type": "text", "text": "Plant one.", **_CONTROL}]}
_CALL = {"type": "tool_use", "id": "toolu_1", "name": "plant", "input": {"n": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "It grows."}]}
_TOOL = {"name": "plant", "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}, **_CONTROL}
_MESSAGES: list[dict] = [
    {"max_tokens": 4, "system": "Be brief.", "messages": [_ASKED], "stop_sequences": ["a"], "cache_control": None},
    {"max_tokens": 8, "messages": [_ASKED], "tools": [_TOOL], "tool_choice": {"type": "any"}, "stream": True},
    {
        **{"max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": True},
        "messages": [
            *(_ASKED, {"role": "assistant", "content": [_CALL]}, {"role": "user", "content": [_RESULT]}),
            {"role": "assistant", "content": "It is"},
        ],
    },
]
_BODIES: list[dict] = [
    {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 4, "stop": ["a", "é"], "logit_bias": {"5": -1}}},
    {
        "input_ids": [[1, 2, 3], [4]],
        "sampling_params": [{"n": 2, "max_new_tokens": 2}, {"top_k": 3, "max_new_tokens": 1}],
    },
    {
        **{"text": ["a", "b"], "rid": ["x", "y"], "return_logprob": True, "top_logprobs_num": 2},
        **{"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 3}},
    },
    {"text": "JSON:", "sampling_params": {"json_schema": '{"type": "object"}', "max_new_tokens": 8}},
    {"text": "x", "sampling_params": {"regex": "[a-z]{2,5}(x|y)*", "max_new_tokens": 8, "temperature": 1.5}},
    {"text": "count", "stream": True, "timeout_s": 20, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}},
]

_WORDS = [
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b'"\\ud800"', b"[]", b"{}", b"[[[[", b"0", b"99999999999999999999"),
    *(b'"stream": true,', b'"n": 64', b'"max_new_tokens": 0', b"\xff\xfe", b"\x00", b"\\u0000", b'"', b"\\", b",,"),
    *(b'"temperature": 1e-300', b'"top_p": 1e-9', b'"min_p": 1', b'"regex": "(a|b)*"', b"\xf0\x9f\x8c\xb1"),
]


# Ends of streams, by the routes' kinds.
_ENDS = (b"data: [DONE]", b"event: message_stop", b"event: error")


def _damaged(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body for it that is damaged."""
    path, bodies = draw.choice((("/generate", _BODIES), ("/v1/messages", _MESSAGES)))
    if path == "/v1/messages" and draw.random() < 0.2:
        path = "/v1/messages/count_tokens"
    data = bytearray(json.dumps(draw.choice(bodies)).encode())
    for _ in range(draw.choice([0, 1, 1, 2, 4, 8])):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at:at] = draw.choice(_WORDS)
            case 2:
                del data[at : at + draw.randrange(1, 12)]
            case 3:
                end = min(len(data), at + draw.randrange(1, 20))
                data[at:end] = draw.choice(_WORDS)
            case 4:
                other = json.dumps(draw.choice(bodies)).encode()
                start = draw.randrange(len(other))
                data[at:at] = other[start : start + draw.randrange(1, 40)]
            case _:
                data = data[:at] if draw.random() < 0.2 else data
    return path, bytes(data)


async def _send(server: Server, data: bytes, draw: random.Random) -> tuple[str, str]:
    """Send a body in a random way; the status, or what the client did, and a problem of the answer or an empty text."""
    async with Wire(server.address) as wire:
        way = draw.choice(["whole", "whole", "pieces", "cut", "reset", "stall"])
        if way == "pieces":
            for at in range(0, len(data), 50):
                await wire.send(data[at : at + 50])
                await asyncio.sleep(0)
        else:
            await wire.send(data if way != "cut" else data[: draw.randrange(len(data))])
        if way == "cut":
            return "cut", ""
        if way in ("reset", "stall"):
            await wire.receive(draw.randrange(1, 400))
            if way == "reset":
                wire.reset()
                return "reset", ""
            await asyncio.sleep(draw.random())
            return "stalled", ""
        return _judge(await wire.receive_all())


def _judge(answer: bytes) -> tuple[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode(errors="replace")
    if not status.isdigit() or status >= "500":
        return status or "none", f"answered {head[:40]!r}"
    if status >= "400":
        try:
            detail = json.loads(body)["error"]
        except (ValueError, LookupError, TypeError):
            return status, f"not in the error schema: {body[:100]!r}"
        return status, "" if set(detail) == {"message", "type", "param", "code"} else f"wrong schema: {detail}"
    if b"text/event-stream" in head and not any(end in body for end in _ENDS):
        return status, "a stream without its end"
    return status, ""


def _memory(before: dict[str, float], after: dict[str, float]) -> str:
    parts = [f"{name} {100 * (after[name] / before[name] - 1):+.1f} %" for name in before]
    return f"memory {', '.join(parts)}"
