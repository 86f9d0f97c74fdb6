"""`ramet bench next_turn`: what it saves, and costs others, to compute a chat's next turn while the server is idle."""

import json
import random
import secrets
import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from loadgen.harness import Bench, Cell, Figure, repeats_of
from loadgen.http.local_server import local_server, small_model
from loadgen.http.prose import Prose

# Thoughts stay only behind the user's last message, as in Qwen3's template. The comment shows that tools are known.
TEMPLATE = """{#- tools, tool_calls -#}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set text = m.content.split('</think>')[-1] if loop.index0 < ns.last else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_CELLS = {"off": 0, "on": 4096, "thoughts kept": 4096}
# Seconds for which the server is idle between the turns, unless it computes for longer.
_PAUSE_S = 0.5


class NextTurn(Bench):
    """TTFT of a chat's second turn, whose template leaves out thoughts, and of others' requests between the turns."""

    figures = (
        Figure("ttft", "TTFT of turn two, ms", ".0f", 1000, versus="ratio", plotted=True),
        Figure("computed", "computed while idle", ",.0f"),
        Figure("others", "TTFT of others, ms, p50", ".1f", 1000, versus="difference"),
        Figure("others", "p99", ".1f", 1000, "p99", versus="difference"),
    )

    repeats: int = repeats_of(7)
    steps: int = Field(4, gt=0, description="calls of tools in the first turn, each behind thoughts")
    step_tokens: int = Field(
        300, gt=0, description="tokens of a step: a third are thoughts, the others a tool's result"
    )
    others: int = Field(12, gt=0, description="short requests of others after another first turn")
    small: bool = Field(False, description="serve a small random model: it counts the same tokens in less time")
    server_options: str = Field("", description="options of the servers that are started, as one text")

    _clients: dict[str, httpx.Client]

    @contextmanager
    def session(self) -> Iterator[None]:
        with ExitStack() as closing:
            directory = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            (directory / "template").write_text(TEMPLATE)
            (directory / "kept").write_text(TEMPLATE.replace(".split('</think>')[-1]", ""))
            options = shlex.split(self.server_options)
            if self.small:
                options += ["--model", str(closing.enter_context(small_model())), "--random-weights"]
            self._clients = {}
            for name, tokens in _CELLS.items():
                template = directory / ("kept" if name == "thoughts kept" else "template")
                given = ["--chat-template", str(template), "--next-turn-tokens", str(tokens)]
                url = closing.enter_context(local_server([*options, *given]))
                self._clients[name] = closing.enter_context(httpx.Client(base_url=url, timeout=600))
            yield

    def baseline(self) -> tuple[str, str]:
        return "next turn", "off"

    def cells(self) -> list[Cell]:
        return [{"next turn": name} for name in _CELLS]

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        client, prose = self._clients[cell["next turn"]], Prose(random.Random(draw.random()))
        before = _computed(client)
        chat = self._first_turn(client, prose)
        computed = _wait(client) - before
        ttft = _first_token(client, [*chat, {"role": "user", "content": prose.text(20)}])
        # Another chat, after whose turn others' requests come at any time.
        self._first_turn(client, prose)
        waits = []
        for _ in range(self.others):
            time.sleep(draw.uniform(0, 0.1))
            waits.append(_first_token(client, [{"role": "user", "content": prose.text(20)}]))
        _wait(client)
        return {"ttft": ttft, "computed": computed, "others": waits}

    def _first_turn(self, client: httpx.Client, prose: Prose) -> list[dict[str, str]]:
        """The messages of a first turn, and its answer."""
        chat = [{"role": "system", "content": f"{secrets.token_hex(8)} {prose.text(200)}"}]
        chat.append({"role": "user", "content": prose.text(40)})
        for _ in range(self.steps):
            thoughts, result = prose.text(self.step_tokens / 3), prose.text(self.step_tokens * 2 / 3)
            chat.append({"role": "assistant", "content": f"<think>{thoughts}</think>I look."})
            chat.append({"role": "tool", "content": result})
        answer = client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 8, "temperature": 0})
        return [*chat, answer.raise_for_status().json()["choices"][0]["message"]]


def _first_token(client: httpx.Client, messages: list[dict[str, str]]) -> float:
    """Seconds to the first token of an answer, which has no other."""
    began, seconds = time.perf_counter(), 0.0
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "stream": True, "cache": {"store": False}}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not seconds and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["finish_reason"]:
                seconds = time.perf_counter() - began
    return seconds


def _computed(client: httpx.Client) -> int:
    return int(client.get("/server_info").json()["state"]["next_turn_tokens"])


def _wait(client: httpx.Client) -> int:
    """Wait until the server computes nothing; the tokens that it has computed while idle."""
    last, now = -1, 0
    while now != last:
        time.sleep(_PAUSE_S)
        last, now = now, _computed(client)
    return now
