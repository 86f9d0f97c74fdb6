"""Tools: bodies, and their description in the prompt.

For chat templates without tools, a system message describes them, with calls between `<tool_call>` tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.models.marks import cut, new_mark
from runtime.models.tokenizer import Tokenizer
from runtime.sampling.json_text import parse_json
from server.http.wire import Body, ByType, JsonObject, JsonText, Text
from server.openai.caching import Breakpoint, Mark, unmarked

MAX_TOOLS = 128

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    IGNORED = frozenset({"strict"})

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function
    prompt_cache_breakpoint: Breakpoint | None = None

    def marked(self, mark: Mark) -> list[Tool]:
        """The tool, followed by one whose name is what `mark` writes, if it writes."""
        name = mark(self.prompt_cache_breakpoint)
        return (
            [self, Tool.model_construct(type="function", function=Function.model_construct(name=name))]
            if name
            else [self]
        )

    def plain(self) -> dict[str, Any]:
        """The chat template's dict."""
        described = {"description": self.function.description or "", "parameters": self.schema_of_arguments()}
        return {"type": "function", "function": {"name": self.function.name, **described}}

    def schema_of_arguments(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class NamedFunction(Body):
    """The function that must be called."""

    name: Name


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def names(self) -> set[str]:
        return {self.function.name}


class Allowed(Body):
    """Tools of those in the prompt that may be called, or of which one must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """OpenAI's choice of a few tools, whose prompt, and so its cached part, stays that of all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


ToolChoice = Annotated[NamedTool | AllowedTools | Literal["none", "auto", "required"], ByType()]


class CalledFunction(Body, extra="ignore"):
    """The function of an earlier call; `arguments` is JSON text, or the object."""

    name: Text
    arguments: JsonText = ""


class ToolCall(Body, extra="ignore"):
    """An earlier call, as clients send it back."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    prompt_cache_breakpoint: Breakpoint | None = None

    def plain(self, mark: Mark = unmarked) -> list[dict[str, Any]]:
        """The chat template's dict, with the arguments as an object if they are one.

        A call whose name is what `mark` writes follows, if it writes.
        """
        try:
            arguments = parse_json(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        name, given = mark(self.prompt_cache_breakpoint), {"name": self.function.name, "arguments": arguments}
        functions = [given, {"name": name, "arguments": {}}] if name else [given]
        return [{"id": self.id, "type": "function", "function": function} for function in functions]


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[Tool],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation with tools; `variables`: of the chat template. Raises InvalidRequest."""
    if "tools" not in (tokenizer.chat_template or ""):
        messages, tools = with_tools(tokenizer, messages, tools), []
    else:
        messages = with_tools(tokenizer, messages, [])
    described = [tool.plain() for tool in tools] or None
    return tokenizer.apply_chat_template(messages, add_generation_prompt, described, variables or {})


def continue_chat(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """The prompt that ends within the last message, which the answer continues.

    Args:
        messages: the last one's content is a text.
        render: applies the chat template to messages, without a generation prompt.

    Raises:
        InvalidRequest: if the template would change the end of the message.
    """
    *earlier, last = messages
    mark = new_mark()
    pieces = cut(render([*earlier, {**last, "content": last["content"] + mark}]), [mark])
    if pieces is None:
        raise InvalidRequest("this model's chat template changes the last message", param="continue_final_message")
    return pieces[0]


def with_tools(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[Tool]) -> list[dict[str, Any]]:
    """A conversation whose system message describes tools; calls are text where the chat template has none."""
    if "tool_calls" not in (tokenizer.chat_template or ""):
        messages = [_without_calls(message) for message in messages]
    return _described(messages, [tool.plain() for tool in tools]) if tools else messages


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message as text alone, for templates without tool calls."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        texts = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
        return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *texts])}
    return message


def _described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n<tools>\n{signatures}\n</tools>\n"
        "To call one, write its name and its arguments as JSON between two tags:\n"
        f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
    )
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
