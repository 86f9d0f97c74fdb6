"""Bodies of a MiB that cost a server as much as can be, and what somebody else notices of them."""

from __future__ import annotations

import asyncio
import json
import random
import time

import aiohttp

from loadgen.faults.server import Finding, Server, cpu_seconds, ids, memory_mib

_BYTES = 1 << 20
# Longest time that `/health` may take, and that somebody else's stream may stand still, as the engine may compute an
# answer: beyond those of a quiet server, and no more than the server computed. A busy machine is no fault of it.
_NOTICED_S = {"health": 0.3, "stream": 1.0}
_MEMORY_MIB = 128.0


def _many(item: str) -> str:
    """A list of a MiB."""
    return "[" + ",".join([item] * (_BYTES // (len(item) + 1) - 50)) + "]"


def _bodies(draw: random.Random) -> dict[tuple[str, str], str]:
    """Bodies by route and name."""
    keys = ",".join(f'"{i:x}":0' for i in range(_BYTES // 12))
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 128}
    greedy = {"max_new_tokens": 1, "temperature": 0}
    long = {"input_ids": [ids(draw, 400) for _ in range(4)], "sampling_params": greedy, **logprobs}
    return {
        ("/generate", "numbers below zero"): f'{{"input_ids": {_many("-1")}}}',
        ("/generate", "empty texts for numbers"): f'{{"input_ids": {_many(chr(34) * 2)}}}',
        ("/generate", "empty lists of tokens"): f'{{"input_ids": {_many("[]")}}}',
        ("/generate", "empty texts"): f'{{"text": {_many(chr(34) * 2)}}}',
        ("/generate", "objects for texts"): f'{{"text": {_many("{}")}}}',
        ("/generate", "stop numbers"): f'{{"text": "x", "sampling_params": {{"stop": {_many("1")}}}}}',
        ("/generate", "empty parameters"): f'{{"text": "x", "sampling_params": {_many("{}")}}}',
        ("/generate", "unknown fields"): f"{{{keys}}}",
        ("/generate", "a long text"): json.dumps({"text": "ab " * (_BYTES // 3)}),
        ("/generate", "log-probabilities"): json.dumps(long),
        ("/v1/completions", "objects for prompts"): f'{{"prompt": {_many("{}")}}}',
        ("/v1/completions", "lists for prompts"): f'{{"prompt": {_many("[{}]")}}}',
        ("/v1/chat/completions", "numbers for messages"): f'{{"messages": {_many("0")}}}',
        ("/v1/chat/completions", "empty messages"): f'{{"messages": {_many("{}")}}}',
        (
            "/v1/chat/completions",
            "numbers in a message",
        ): f'{{"messages": [{{"role": "user", "content": {_many("0")}}}]}}',
        ("/v1/chat/completions", "empty tools"): f'{{"messages": [], "tools": {_many("{}")}}}',
        ("/tokenize", "objects for prompts"): f'{{"prompt": {_many("{}")}}}',
        ("/tokenize", "a long text"): json.dumps({"prompt": "ab " * 1000}),
        ("/detokenize", "numbers below zero"): f'{{"tokens": {_many("-1")}}}',
        ("/detokenize", "many tokens"): f'{{"tokens": {_many("7")}}}',
        ("/detokenize", "empty lists"): f'{{"tokens": {_many("[]")}}}',
        ("/cache/pin", "numbers for messages"): f'{{"messages": {_many("0")}}}',
    }


class _Bystander:
    """Somebody else: reads a stream, and asks for `/health`, all the time.

    Attributes:
        worst_s: longest time of a `/health`, and between two events of the stream, since they were last set to zero.
        events, answers: that it has had.
    """

    def __init__(self, server: Server, draw: random.Random):
        self.worst_s = dict.fromkeys(_NOTICED_S, 0.0)
        self.events = self.answers = 0
        self._server = server
        self._draw = draw

    async def read(self) -> None:
        while True:
            async with self._server.stream(ids(self._draw, 20), 300) as answer:
                last_s = time.perf_counter()
                async for _ in answer.content:
                    now_s = time.perf_counter()
                    self.worst_s["stream"] = max(self.worst_s["stream"], now_s - last_s)
                    last_s = now_s
                    self.events += 1

    async def ask(self) -> None:
        while True:
            asked_s = time.perf_counter()
            async with self._server.http.get(f"{self._server.url}/health") as answer:
                await answer.read()
            self.worst_s["health"] = max(self.worst_s["health"], time.perf_counter() - asked_s)
            self.answers += 1
            await asyncio.sleep(0.02)

    async def served(self) -> None:
        """Wait until it is served again, so that what it waited for is known."""
        events, answers = self.events, self.answers
        while self.events <= events + 1 or self.answers <= answers + 1:
            await asyncio.sleep(0.01)


async def amplify(server: Server, scale: float, draw: random.Random) -> Finding:
    """The worst bodies of a MiB, one after the other, beside a stream and `/health`."""
    await server.warm_up(draw)
    bodies = _bodies(draw)
    if scale < 1:
        bodies = dict(draw.sample(list(bodies.items()), max(int(len(bodies) * scale), 2)))
    somebody = _Bystander(server, draw)
    tasks = [asyncio.create_task(somebody.read()), asyncio.create_task(somebody.ask())]
    await asyncio.sleep(1)
    somebody.worst_s = dict.fromkeys(_NOTICED_S, 0.0)
    await asyncio.sleep(max(5 * scale, 1))
    quiet_s, before = somebody.worst_s, memory_mib(server.process.pid, "VmHWM")
    rows: list[list[str]] = [["route", "body", "KiB", "status", "server's CPU", "/health", "a stream stands still"]]
    problems, facts = [], {}
    for (route, name), body in bodies.items():
        status, cpu_s = await _cost(server, somebody, route, body)
        facts[f"{route} {name}"] = {"status": status, "cpu_s": cpu_s, **somebody.worst_s}
        waits = [f"{1000 * seconds:.0f} ms" for seconds in somebody.worst_s.values()]
        rows.append([route, name, f"{len(body) >> 10}", str(status), f"{cpu_s:.2f} s", *waits])
        problems += [
            f"{route}, {name}: {what} takes {somebody.worst_s[what]:.1f} s, the server's CPU {cpu_s:.1f} s"
            for what, most_s in _NOTICED_S.items()
            if min(somebody.worst_s[what] - quiet_s[what], cpu_s) > most_s
        ]
        problems += [f"{route}, {name}: status {status}"] if status >= 500 and status != 503 else []
    for task in tasks:
        problems += [f"the bystander: {task.exception()!r}"] if task.done() else []
        task.cancel()
    await asyncio.wait(tasks)
    if (grown := memory_mib(server.process.pid, "VmHWM") - before) > _MEMORY_MIB:
        problems.append(f"the server's peak grew by {grown:.0f} MiB")
    problems += await server.problems()
    worst = {name: max(fact[name] for fact in facts.values()) for name in ("cpu_s", *_NOTICED_S)}
    waits = [f"{what} {1000 * worst[what]:.0f} ms ({1000 * quiet_s[what]:.0f} if it is quiet)" for what in _NOTICED_S]
    seen = f"at most {worst['cpu_s']:.2f} CPU seconds, {', '.join(waits)}; the server's peak grew by {grown:.0f} MiB"
    return Finding(f"{len(bodies)} bodies of a MiB that cost much", seen, problems, facts, list(rows))


async def _cost(server: Server, somebody: _Bystander, route: str, body: str) -> tuple[int, float]:
    """The status of a body, and the server's CPU seconds until the bystander is served again."""
    somebody.worst_s, cpu_s = dict.fromkeys(_NOTICED_S, 0.0), cpu_seconds(server.process.pid)
    status = await _post(server, route, body)
    await asyncio.wait_for(somebody.served(), 300)
    return status, cpu_seconds(server.process.pid) - cpu_s


async def _post(server: Server, route: str, body: str) -> int:
    headers = {"Content-Type": "application/json"}
    try:
        timeout = aiohttp.ClientTimeout(120)
        async with server.http.post(server.url + route, data=body, headers=headers, timeout=timeout) as answer:
            await answer.read()
            return answer.status
    except TimeoutError:
        return 599
