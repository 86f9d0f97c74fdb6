"""`ramet bench agents`: cached tokens lost when a coding agent changes what it has already sent."""

import random
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import Field

from loadgen.harness import Bench, BenchError, Cell, Figure, Results, repeats_of, warmup_of
from loadgen.harness.plots import drawing
from loadgen.http.coding_session import CodingSession, as_chat
from loadgen.http.local_server import local_server, small_model
from loadgen.http.prose import Prose
from loadgen.http.screenshots import ScreenSession, teach_to_see

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
        line = f"x-anthropic-billing-header: cc_version=2.1.{step}; cch={self._draw.getrandbits(20):05x};"
        date = f"It is {step} minutes past {self._draw.randrange(1, 12)}."
        first = {"billing line first": f"{line}\n", "date first": f"{date}\n"}.get(habit, "")
        system = f"{first}{self._system}"
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
    "none", "billing line first", "billing line last", "date first", "thoughts stripped", "tools reordered",
    "keys reordered",
)  # fmt: skip
Way = Literal["messages", "chat", "chat-plain"]
# Ways of sending Claude Code's session: the route, and whether the system prompt begins with a billing line.
_CHAT = "/v1/chat/completions"
WAYS: dict[Way, tuple[str, bool]] = {
    "messages": ("/v1/messages", True),
    "chat": (_CHAT, True),
    "chat-plain": (_CHAT, False),
}


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
    """Prompt tokens read from the cache, by an agent's habit, and in a session of Claude Code's shape."""

    sections = "session"

    figures = (
        Figure("prompt", "prompt tokens", ",.0f"),
        Figure("shared", "longest prefix", ",.0f"),
        Figure("read", "read", ",.0f"),
        Figure("hits", "hits, %", factor=100, plotted=True),
        Figure("prefilled", "prefilled", ",.0f", versus="ratio", plotted=True),
        Figure("over_new", "prefilled / new", ".3f"),
        Figure("seconds", "answer of one token p50, s", ".2f"),
        Figure("seconds", "max, s", ".2f", statistic="max", interval=False),
    )

    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)
    url: str | None = Field(None, description="a running server (default: Ramet is started)")
    model: str | None = Field(
        None, description="the model's name, sent with Claude Code's session alone: other servers need it"
    )
    ways: tuple[Way, ...] = Field(
        tuple(WAYS), description="of sending Claude Code's session; plain: without the billing line"
    )
    requests: int = Field(12, gt=0, lt=_MOST_STEPS, description="requests of a session")
    system_tokens: int = Field(400, gt=0, description="tokens of the system prompt")
    step_tokens: int = Field(200, gt=0, description="tokens of a thought and a result")
    turns: int = Field(40, gt=0, description="requests of Claude Code's session")
    small: bool = Field(False, description="serve a small random model: it counts the same tokens in less time")
    screenshots: int = Field(
        0, ge=0, description="instead: sessions in which each of so many requests has one more screenshot"
    )
    agents: int = Field(10, gt=0, description="sessions with screenshots, which take turns")
    server_options: str = Field("", description="options of the server that is started, as one text")

    _client: httpx.Client

    @contextmanager
    def session(self) -> Iterator[None]:
        with ExitStack() as closing:
            options = shlex.split(self.server_options)
            if self.small:
                model = closing.enter_context(small_model())
                if self.screenshots:
                    teach_to_see(model)
                options += ["--model", str(model), "--random-weights"]
            url = self.url or closing.enter_context(local_server(options))
            self._client = closing.enter_context(httpx.Client(base_url=url, timeout=600))
            yield

    def baseline(self) -> tuple[str, str]:
        return "habit", HABITS[0]

    def cells(self) -> list[Cell]:
        if self.screenshots:
            return [{"session": "screenshots", "habit": HABITS[0]}]
        short = [{"session": "short", "habit": habit} for habit in HABITS if self.model is None]
        return short + [{"session": "Claude Code", "habit": way} for way in self.ways]

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        """Token counts of a session, which shares its cache with no other one; `steps` has those of each request."""
        steps: Sequence[Mapping[str, float]]
        if self.screenshots:
            steps = self._screens(draw)
        elif cell["habit"] in WAYS:
            steps = self._claude_code(cell["habit"], draw)
        else:
            steps = self._short(cell["habit"], draw)
        total = {name: sum(step[name] for step in steps) for name in ("prompt", "shared", "read")}
        prefilled = total["prompt"] - total["read"]
        found = {"hits": total["read"] / total["prompt"], "prefilled": prefilled, "steps": steps}
        seconds = [step["seconds"] for step in steps if "seconds" in step]
        return total | found | {"over_new": prefilled / (total["prompt"] - total["shared"]), "seconds": seconds}

    def _claude_code(self, way: Way, draw: random.Random) -> list[dict[str, float]]:
        """Steps of a conversation; each prompt extends the one before, with which it shares all of its tokens."""
        route, billing = WAYS[way]
        session = CodingSession(draw.randrange(1 << 32), self.turns, self.system_tokens, self.step_tokens, billing)
        options = {"cache_salt": secrets.token_hex(8), "max_tokens": 1, "temperature": 0}
        options |= {"model": self.model} if self.model else {}
        steps: list[dict[str, float]] = []
        for turn in range(self.turns):
            if (title := session.title(turn)) is not None:
                self._ask(route, title, options)
            steps.append(self._ask(route, session.request(turn), options))
            steps[-1]["shared"] = steps[-2]["prompt"] if turn else 0
        return steps

    def _ask(self, route: str, body: Body, options: Body) -> dict[str, float]:
        """Send a body in Anthropic's form, over one of the routes."""
        chat = route == _CHAT
        began = time.monotonic()
        answer = self._client.post(route, json=(as_chat(body) if chat else body) | options)
        seconds = time.monotonic() - began
        if answer.is_error:
            raise BenchError(f"{route}: {answer.status_code} {answer.text[:300]}")
        usage = answer.json()["usage"]
        if chat:
            read = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return {"prompt": usage["prompt_tokens"], "read": read, "seconds": seconds}
        read = usage.get("cache_read_input_tokens") or 0
        computed = usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0)
        return {"prompt": computed + read, "read": read, "seconds": seconds}

    def _screens(self, draw: random.Random) -> list[dict[str, float]]:
        """Steps of all agents; each prompt extends the one before of its agent."""
        salt, steps = secrets.token_hex(8), list[dict[str, float]]()
        seeds = [draw.randrange(1 << 32) for _ in range(self.agents)]
        sessions = [(ScreenSession(seed, self.system_tokens, self.step_tokens), list[int]()) for seed in seeds]
        for _ in range(self.screenshots):
            for session, before in sessions:
                options = {"cache_salt": salt, "return_token_ids": True, "max_tokens": 1, "temperature": 0}
                began = time.monotonic()
                answer = self._client.post(_CHAT, json=session.request() | options).raise_for_status().json()
                if left_out := answer.get("left_out"):
                    raise BenchError(f"the model does not see: {', '.join(left_out)}")
                prompt, details = answer["prompt_token_ids"], answer["usage"]["prompt_tokens_details"]
                counts = {"prompt": len(prompt), "shared": _common(prompt, before), "read": details["cached_tokens"]}
                steps.append({**counts, "seconds": time.monotonic() - began})
                before[:] = prompt
        return steps

    def draw_plot(self, results: Results, path: Path) -> bool:
        """Draw the computed tokens and the seconds of each request of Claude Code's session."""
        with drawing(path, (10, 4), 1, 2) as (tokens, times):
            for cell in results.cells.values():
                if cell["habit"] in WAYS and (found := results.of(cell)):
                    steps = found[max(found)]["steps"]
                    label = ", ".join(cell[name] for name in ("run", "habit") if name in cell)
                    tokens.plot([step["prompt"] - step["read"] for step in steps], label=label)
                    times.plot([step["seconds"] for step in steps], label=label)
                    new = [step["prompt"] - step["shared"] for step in steps]
            tokens.plot(new, "k:", label="new to the conversation")
            tokens.set(xlabel="request", ylabel="computed prompt tokens", yscale="log")
            times.set(xlabel="request", ylabel="seconds to an answer of one token", yscale="log")
            for axes in (tokens, times):
                axes.grid(alpha=0.3)
            tokens.legend(fontsize=6)
        return True

    def _short(self, habit: str, draw: random.Random) -> list[dict[str, float]]:
        session = AgentSession(draw.randrange(1 << 32), self.system_tokens, self.step_tokens)
        salt, steps, earlier = secrets.token_hex(8), list[dict[str, float]](), list[list[int]]()
        for step in range(self.requests):
            options = {"cache_salt": salt, "prompt_cache_options": {"mode": "explicit"}, "return_token_ids": True}
            body = {**session.request(step, habit), **options, "max_tokens": 1, "temperature": 0}
            answer = self._client.post(_CHAT, json=body).raise_for_status().json()
            prompt, details = answer["prompt_token_ids"], answer["usage"]["prompt_tokens_details"]
            shared = min(max((_common(prompt, other) for other in earlier), default=0), len(prompt) - 1)
            earlier.append(prompt)
            steps.append({"prompt": len(prompt), "shared": shared, "read": details["cached_tokens"]})
        return steps


def _common(one: list[int], other: list[int]) -> int:
    """Leading tokens that two prompts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
