"""`ramet bench agents`: cached tokens lost when a coding agent changes what it has already sent."""

import random
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
from pydantic import Field

from loadgen.harness import Bench, Cell, Figure, repeats_of, warmup_of
from loadgen.http.local_server import local_server
from loadgen.http.prose import Prose

Body = dict[str, Any]
# Requests of a session between two messages of its user.
_STEPS = 4
_MOST_STEPS = 64
_CONVERSATION = {"prompt_cache_breakpoint": {"mode": "explicit"}}


class AgentSession:
    """A session of a coding agent: a system prompt, tools, thoughts, and results that come back.

    Each request sends the whole conversation, with a breakpoint at its last message.
    """

    def __init__(self, seed: int, system_tokens: int, step_tokens: int):
        self._draw = random.Random(seed)
        prose = Prose(self._draw)
        self._system = prose.text(system_tokens)
        self._tools = [_tool(name, prose, system_tokens / 6) for name in ("read", "write", "run")]
        self._said = [tuple(prose.text(step_tokens * share) for share in (0.2, 0.3, 0.5)) for _ in range(_MOST_STEPS)]

    def request(self, step: int, habit: str) -> Body:
        """The body of request `step`, of an agent with one of `HABITS`."""
        line = f"x-billing: version=1.{step}; id={self._draw.getrandbits(40):010x};"
        system = f"{line}\n{self._system}" if habit == "billing line first" else self._system
        tools = self._tools
        if habit == "tools reordered":
            tools = self._draw.sample(tools, len(tools))
        if habit == "keys reordered":
            tools = [_shuffled(tool, self._draw) for tool in tools]
        turns = self._turns(step, stripped=habit == "thoughts stripped")
        if habit == "billing line last":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{line}"}
        turns[-1] = {**turns[-1], "content": [{"type": "text", "text": turns[-1]["content"], **_CONVERSATION}]}
        return {"messages": [{"role": "system", "content": system}, *turns], "tools": tools}

    def _turns(self, step: int, stripped: bool) -> list[Body]:
        """The messages of a user, and the steps since each of them; `stripped`: older steps have no thoughts."""
        turns: list[Body] = []
        for i in range(step + 1):
            asked, thought, result = self._said[i]
            if i % _STEPS == 0:
                turns.append({"role": "user", "content": asked})
            if i == step:
                break
            old = i // _STEPS < step // _STEPS
            shown = "I look." if stripped and old else f"<think>{thought}</think>I look."
            turns.append({"role": "assistant", "content": shown})
            turns.append({"role": "user", "content": f"<result>{result}</result>"})
        return turns


HABITS = (
    "none", "billing line first", "billing line last", "thoughts stripped", "tools reordered", "keys reordered"
)  # fmt: skip


def _tool(name: str, prose: Prose, tokens: float) -> Body:
    properties = {key: {"type": "string", "description": prose.text(tokens / 2)} for key in ("path", "text")}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    function = {"name": name, "description": prose.text(tokens), "parameters": schema}
    return {"type": "function", "function": function}


def _shuffled(value: Any, draw: random.Random) -> Any:
    """A JSON value with the keys of its objects in another order."""
    if not isinstance(value, dict):
        return value
    return {key: _shuffled(value[key], draw) for key in draw.sample(list(value), len(value))}


class AgentsBench(Bench):
    """Prompt tokens that a server reads from its cache, by the agent's habit."""

    figures = (
        Figure("prompt", "prompt tokens", ",.0f"),
        Figure("shared", "longest prefix", ",.0f"),
        Figure("read", "read", ",.0f"),
        Figure("hits", "hits, %", factor=100, plotted=True),
        Figure("prefilled", "prefilled", ",.0f", versus="ratio", plotted=True),
    )

    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)
    url: str | None = Field(None, description="a running Ramet server (default: one is started)")
    requests: int = Field(12, gt=0, lt=_MOST_STEPS, description="requests of a session")
    system_tokens: int = Field(400, gt=0, description="tokens of the system prompt")
    step_tokens: int = Field(200, gt=0, description="tokens of a thought and a result")
    server_options: str = Field("", description="options of the server that is started, as one text")

    _client: httpx.Client

    @contextmanager
    def session(self) -> Iterator[None]:
        server = nullcontext(self.url) if self.url else local_server(shlex.split(self.server_options))
        with server as url, httpx.Client(base_url=url, timeout=600) as self._client:
            yield

    def baseline(self) -> tuple[str, str]:
        return "habit", HABITS[0]

    def cells(self) -> list[Cell]:
        return [{"habit": habit} for habit in HABITS]

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        """Token counts of a session, which shares its cache with no other one; `steps` has those of each request."""
        session = AgentSession(draw.randrange(1 << 32), self.system_tokens, self.step_tokens)
        salt, steps, earlier = secrets.token_hex(8), list[dict[str, int]](), list[list[int]]()
        for step in range(self.requests):
            options = {"cache_salt": salt, "prompt_cache_options": {"mode": "explicit"}, "return_token_ids": True}
            body = {**session.request(step, cell["habit"]), **options, "max_tokens": 1, "temperature": 0}
            answer = self._client.post("/v1/chat/completions", json=body).raise_for_status().json()
            prompt, details = answer["prompt_token_ids"], answer["usage"]["prompt_tokens_details"]
            shared = min(max((_common(prompt, other) for other in earlier), default=0), len(prompt) - 1)
            earlier.append(prompt)
            steps.append({"prompt": len(prompt), "shared": shared, "read": details["cached_tokens"]})
        total = {name: sum(step[name] for step in steps) for name in steps[0]}
        hits = total["read"] / total["prompt"]
        return total | {"hits": hits, "prefilled": total["prompt"] - total["read"], "steps": steps}


def _common(one: list[int], other: list[int]) -> int:
    """Leading tokens that two prompts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
