"""A session of Claude Code's shape, in Anthropic's form and as a chat."""

import json
import random
from typing import Any

from loadgen.http.prose import Prose

Body = dict[str, Any]
_TOOLS = ("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "TaskCreate", "Write")
# Requests between two messages of the user, and between two requests for a title.
_STEPS, _TITLES = 5, 8


class CodingSession:
    """A recorded session: each request sends the whole conversation, whose thoughts the client has left out.

    A system message follows the user's first message, and other system prompts ask for titles in between.

    Args:
        system_tokens: of the system prompt; the tools have three times as many together.
        step_tokens: of an answer, its call and the call's result together.
        billing: the first block of the system prompt is a line that differs in each request.
    """

    def __init__(self, seed: int, turns: int, system_tokens: int, step_tokens: int, billing: bool):
        self._billing = billing
        self._draw = random.Random(seed)
        self._prose = prose = Prose(self._draw)
        self._system, self._reminder = prose.text(system_tokens), prose.text(system_tokens / 4)
        names = _TOOLS[: max(2, system_tokens // 50)]  # fewer beside a short prompt, since each has a text of its own
        size = 3 * system_tokens / len(names)
        self._tools = [
            {"name": name, "description": prose.text(size * 0.7), "input_schema": _schema(prose.text(size * 0.1))}
            for name in names
        ]
        shares = (0.15, 0.1, 0.15, 0.6)
        self._said = [tuple(prose.text(step_tokens * share) for share in shares) for _ in range(turns)]

    def request(self, turn: int) -> Body:
        """The body of a request of the conversation."""
        messages: list[Body] = []
        for i, (asked, said, argument, result) in enumerate(self._said[: turn + 1]):
            if i % _STEPS == 0:
                _add(messages, "user", _text(asked))
            if i == 0:
                messages.append({"role": "system", "content": self._reminder})
            if i == turn:
                break
            call = {
                "type": "tool_use",
                "id": f"toolu_{i}",
                "name": self._tools[i % len(self._tools)]["name"],
                "input": {"path": argument},
            }
            messages.append({"role": "assistant", "content": [_text(said), call]})
            _add(messages, "user", {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": result})
        return {"system": self._blocks(self._system), "tools": self._tools, "messages": messages}

    def title(self, turn: int) -> Body | None:
        """The body of a request for a title, which comes before this request of the conversation; None: no such one."""
        if turn % _TITLES:
            return None
        return {
            "system": self._blocks("Write a title of at most six words for this conversation."),
            "messages": [{"role": "user", "content": self._said[turn][0]}],
        }

    def _blocks(self, text: str) -> list[Body]:
        version = f"2.1.{self._draw.randrange(200)}.{self._draw.getrandbits(12):03x}"
        hash_ = f"{self._draw.getrandbits(20):05x}"
        line = f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli; cch={hash_};"
        blocks = [_text("You are a coding agent."), _text(text)]
        return [_text(line), *blocks] if self._billing else blocks


def as_chat(body: Body) -> Body:
    """A request in Anthropic's form as a chat."""
    system = "\n".join(block["text"] for block in body["system"])
    turns: list[Body] = [{"role": "system", "content": system}]
    for message in body["messages"]:
        given = message["content"]
        blocks = [_text(given)] if isinstance(given, str) else given
        said = "\n".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [_call(block) for block in blocks if block["type"] == "tool_use"]
        results = [block for block in blocks if block["type"] == "tool_result"]
        turns += [{"role": "tool", "tool_call_id": one["tool_use_id"], "content": one["content"]} for one in results]
        if said or calls:
            turns.append({"role": message["role"], "content": said})
            if calls:
                turns[-1]["tool_calls"] = calls
    tools = [
        {"type": "function", "function": {"name": tool["name"], "description": tool["description"],
                                          "parameters": tool["input_schema"]}}
        for tool in body.get("tools", [])
    ]  # fmt: skip
    return {"messages": turns, "tools": tools} if tools else {"messages": turns}


def _text(text: str) -> Body:
    return {"type": "text", "text": text}


def _add(messages: list[Body], role: str, block: Body) -> None:
    """Add a block to the last message if it has this role, or else as a message of its own."""
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"].append(block)
    else:
        messages.append({"role": role, "content": [block]})


def _schema(words: str) -> Body:
    path = {"type": "string", "description": words}
    return {"type": "object", "properties": {"path": path}, "required": ["path"]}


def _call(block: Body) -> Body:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}
