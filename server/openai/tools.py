"""Tools: their description in the prompt, and the parser of a model's calls.

Three formats are parsed: a JSON object between `<tool_call>` tags (Qwen, Hermes, SmolLM2), a list after `[TOOL_CALLS]`
(Mistral), and a text that is one JSON object (Llama). For chat templates without tools, a system message describes them
in the first format.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from runtime.errors import InvalidRequest
from runtime.models.marks import cut, new_mark
from runtime.models.tokenizer import Tokenizer
from runtime.sampling.json_text import parse_json
from server.http.wire import Body, JsonObject, JsonText, Text

MAX_TOOLS = 128

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


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


def kind_of_choice(value: Any) -> str:
    """The tag of a `tool_choice`."""
    if not isinstance(value, dict):
        return "a word"
    return "some tools" if value.get("type") == "allowed_tools" else "a tool"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedTool, Tag("a tool")]
    | Annotated[AllowedTools, Tag("some tools")],
    Discriminator(kind_of_choice),
]


class CalledFunction(Body):
    """The function of an earlier call; `arguments` is JSON text, or the object."""

    model_config = ConfigDict(extra="ignore")

    name: Text
    arguments: JsonText = ""


class ToolCall(Body):
    """An earlier call, as clients send it back."""

    model_config = ConfigDict(extra="ignore")

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The chat template's dict, with the arguments as an object if they are one."""
        try:
            arguments = parse_json(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


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
        texts = [f"{_OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{_CLOSE}" for call in calls]
        return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *texts])}
    return message


def _described(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n<tools>\n{signatures}\n</tools>\n"
        "To call one, write its name and its arguments as JSON between two tags:\n"
        f'{_OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{_CLOSE}'
    )
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def schema_of_call(tools: list[Tool]) -> str:
    """The JSON schema of a call of one of some tools, as text."""
    definitions, forms = {}, []
    for i, tool in enumerate(tools):
        # Unless its schema allows more, a function takes only the parameters that it names.
        closed = {"additionalProperties": False} | tool.schema_of_arguments()
        definitions[f"tool{i}"] = _moved(closed, f"#/$defs/tool{i}/")
        form = {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/tool{i}"}}
        forms.append(
            {"type": "object", "properties": form, "required": ["name", "arguments"], "additionalProperties": False}
        )
    return json.dumps({"anyOf": forms, "$defs": definitions})


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself start at its new place, `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        moved["$ref"] = root + reference[2:]
    return moved


@dataclass(slots=True)
class CallReader:
    """Incremental parser of tool calls.

    Attributes:
        names: the tools that may be called; calls of others stay text.
        forced: whether the whole text is one call.
        single: whether calls after the first are dropped.
        tagged: whether the model writes calls between tags; else its whole text is one or several calls.
    """

    names: frozenset[str]
    forced: bool = False
    single: bool = False
    tagged: bool = True
    num_calls: int = 0
    _held: str = field(default="", init=False)
    _plain: bool = field(default=False, init=False)

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text; returns the text to show now, and the complete calls as OpenAI's `tool_calls`."""
        if not self.names:
            return text, []
        self._held += text
        if self.tagged and not self.forced:
            shown, found = self._between_tags(last)
        else:
            shown, found = self._whole(last)
        if self.single:
            found = found[: max(1 - self.num_calls, 0)]
        calls = [self._numbered(name, arguments) for name, arguments in found]
        return shown, calls

    def _between_tags(self, last: bool) -> tuple[str, list[tuple[str, str]]]:
        shown, found = "", []
        while (start := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, start)
            if end < 0 and not last:
                break
            inner = self._held[start + len(_OPEN) : end if end >= 0 else None]
            stop = end + len(_CLOSE) if end >= 0 else len(self._held)
            calls = self._read(inner)
            shown += self._held[:start].rstrip("\n") if calls else self._held[:stop]
            found += calls
            self._held = self._held[stop:].lstrip("\n") if calls else self._held[stop:]
        keep = len(self._held) if last else self._settled(start)
        shown, self._held = shown + self._held[:keep], self._held[keep:]
        return shown, found

    def _settled(self, start: int) -> int:
        """Characters of the held text before a tag at `start` (-1: none yet), or before the beginning of a tag."""
        if start < 0:
            start = len(self._held) - next(
                (n for n in range(len(_OPEN) - 1, 0, -1) if self._held.endswith(_OPEN[:n])), 0
            )
        return len(self._held[:start].rstrip("\n"))

    def _whole(self, last: bool) -> tuple[str, list[tuple[str, str]]]:
        text = self._held.lstrip()
        starts = any(marker.startswith(text[: len(marker)]) for marker in _MARKERS) or text[:1] in ("{", "[")
        if not last and not self._plain and (starts or not text):
            return "", []
        self._plain = True
        for marker in _MARKERS:
            text = text.removeprefix(marker)
        shown, self._held = self._held, ""
        calls = self._read(text) if starts else []
        return ("", calls) if calls else (shown, [])

    def _read(self, text: str) -> list[tuple[str, str]]:
        """The calls in a JSON text, which is one call or a list of calls; none for other text."""
        try:
            value = parse_json(text)
        except ValueError:
            return []
        entries = value if isinstance(value, list) else [value]
        calls = [(entry.get("name"), _arguments(entry)) for entry in entries if isinstance(entry, dict)]
        known = [(name, arguments) for name, arguments in calls if isinstance(name, str) and name in self.names]
        return known if len(known) == len(entries) else []

    def _numbered(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        function = {"name": name, "arguments": arguments}
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": function,
        }


def _arguments(entry: dict[str, Any]) -> str:
    arguments = entry.get("arguments", entry.get("parameters", {}))
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def writes_tags(tokenizer: Tokenizer) -> bool:
    """Whether the model's chat template puts calls between tags, or has no tools."""
    template = tokenizer.chat_template or ""
    return _OPEN in template or "tools" not in template
