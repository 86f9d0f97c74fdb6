"""Tools in requests, and their description in the prompt.

If the chat template does not support tools, a system message describes them and asks for `<tool_call>` tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import xxhash
from pydantic import Field, model_validator

from runtime.errors import InvalidRequest
from runtime.models.marks import cut, new_mark
from runtime.models.tokenizer import Tokenizer
from runtime.sampling.json_text import parse_json
from server.http.wire import Body, ByType, JsonObject, JsonText, Text, Unusable
from server.openai.caching import Breakpoint, Mark, unmarked
from server.openai.roles import place_systems

MAX_TOOLS = 128

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    IGNORED = frozenset({"strict"})

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None


def _custom_tool(given: Any) -> Any:
    """The dict of a function for that of a `custom` tool, which takes a text."""
    if not isinstance(given, dict) or given.get("type") != "custom" or not isinstance(given.get("custom"), dict):
        return given
    name, description, form = (given["custom"].get(key) for key in ("name", "description", "format"))
    if isinstance(form, dict) and isinstance(grammar := form.get("grammar"), dict):
        form = f"input has the form of this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        description = f"{description or ''}\n{form}"
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {**{key: given[key] for key in given if key != "custom"}, "function": function}


class Tool(Body):
    """A function, or a `custom` tool, which the model sees as a function with the text `input`."""

    type: Literal["function", "custom"]
    function: Function
    prompt_cache_breakpoint: Breakpoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, given: Any) -> Any:
        return _custom_tool(given)

    def marked(self, mark: Mark) -> list[Tool]:
        """The tool. If `mark` returns a text, a second tool with this name follows, which marks the breakpoint."""
        name = mark(self.prompt_cache_breakpoint)
        return (
            [self, Tool.model_construct(type="function", function=Function.model_construct(name=name))]
            if name
            else [self]
        )

    def plain(self) -> dict[str, Any]:
        """The tool as a dict for the chat template."""
        described = {"description": self.function.description or "", "parameters": self.schema_of_arguments()}
        return {"type": "function", "function": {"name": self.function.name, **described}}

    def schema_of_arguments(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


AnyTool = Annotated[Tool | Unusable, ByType()]


class NamedFunction(Body):
    """A function that `tool_choice` names."""

    name: Name


class NamedTool(Body):
    """A tool that `tool_choice` names."""

    ALIASES: ClassVar[Mapping[str, str]] = {"custom": "function"}

    type: Literal["function", "custom"]
    function: NamedFunction

    @property
    def names(self) -> set[str]:
        return {self.function.name}


class Allowed(Body):
    """The tools in the prompt that may be called. With mode `required`, one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """OpenAI's choice of some tools. The prompt still describes all tools, so its cached prefix stays valid."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


ToolChoice = Annotated[NamedTool | AllowedTools | Literal["none", "auto", "required"], ByType()]


class CalledFunction(Body, extra="ignore"):
    """The function of an earlier call; `arguments` is a JSON object or its text."""

    name: Text
    arguments: JsonText = ""


class ToolCall(Body, extra="ignore"):
    """An earlier call that a client sends back."""

    id: Text | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction
    prompt_cache_breakpoint: Breakpoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(custom := given.get("custom"), dict):
            return given
        arguments = json.dumps({"input": custom.get("input") or ""}, ensure_ascii=False)
        return {**given, "function": {"name": custom.get("name"), "arguments": arguments}}

    def plain(self, mark: Mark = unmarked) -> list[dict[str, Any]]:
        """The call as a dict for the chat template. Arguments that are JSON are parsed.

        If `mark` returns a text, a second call with this name follows, which marks the breakpoint.
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
    """The prompt of a conversation with tools; `variables`: the chat template's. Raises InvalidRequest."""
    if "tools" not in (tokenizer.chat_template or ""):
        messages, tools = with_tools(tokenizer, messages, tools), []
    else:
        messages = with_tools(tokenizer, messages, [])
    messages = place_systems(messages, tokenizer.system_turns)
    template = tokenizer.chat_template or ""
    if "[TOOL_CALLS]" in template:
        messages = [_with_short_ids(message) for message in messages]
    if "<|channel|>" in template:
        messages = [_with_one_text(message) for message in messages]
    described = [tool.plain() for tool in tools] or None
    return tokenizer.apply_chat_template(messages, add_generation_prompt, described, variables or {})


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of nine characters, because Mistral's chat templates refuse others."""

    def short(id: str | None) -> str | None:
        return id if id is None or len(id) == 9 else xxhash.xxh64_hexdigest(id.encode())[:9]

    if "tool_call_id" in message:
        return {**message, "tool_call_id": short(message["tool_call_id"])}
    calls = [{**call, "id": short(call["id"])} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text in the reasoning, if it also has calls: gpt-oss's chat template refuses all three."""
    if not (message.get("tool_calls") and message.get("thinking") and message["content"]):
        return message
    return {**message, "thinking": f"{message['thinking']}\n{message['content']}", "content": ""}


def continue_chat(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> str:
    """The prompt up to the end of the last message's text, which the answer continues.

    Args:
        messages: the conversation; the last message's content is a string.
        render: applies the chat template to messages, without a generation prompt.

    Raises:
        InvalidRequest: if the template changes the end of the message.
    """
    *earlier, last = messages
    mark = new_mark()
    pieces = cut(render([*earlier, {**last, "content": last["content"] + mark}]), [mark])
    if pieces is None:
        raise InvalidRequest("this model's chat template changes the last message", param="continue_final_message")
    return pieces[0]


def with_tools(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[Tool]) -> list[dict[str, Any]]:
    """Messages with a system message that describes the tools. If the template has no calls, calls become text."""
    if "tool_calls" not in (tokenizer.chat_template or ""):
        messages = [_without_calls(message) for message in messages]
    return _described(messages, [tool.plain() for tool in tools]) if tools else messages


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its tool calls as text, for chat templates without them."""
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
