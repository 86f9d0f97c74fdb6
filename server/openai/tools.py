"""Tools in requests, and their description in the prompt.

If the chat template does not support tools, a system message describes them and asks for `<tool_call>` tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from runtime.errors import InvalidRequest
from runtime.frontend.pictures import Pictures
from runtime.json_text import parse_json
from runtime.models.marks import cut, new_mark
from runtime.models.templates import TemplateRefused
from runtime.models.tokenizer import Tokenizer
from server.http.body import Body, ByType, JsonObject, JsonText, Text, Unusable
from server.http.fields import ANSWERED
from server.openai.caching import ExplicitBreakpoint, Mark, unmarked
from server.openai.dialects.dialect import CLOSE, OPEN
from server.openai.history import fitted, mended, with_calls_as_text

MAX_TOOLS = 128

Name = Annotated[Text, Field(min_length=1, max_length=128)]


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
    others = {key: given[key] for key in given if key != "custom"}
    return others | {"function": function}


class Tool(Body):
    """A function, or a `custom` tool, which the model sees as a function with the text `input`."""

    type: Literal["function", "custom"]
    function: Function
    prompt_cache_breakpoint: ExplicitBreakpoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, given: Any) -> Any:
        return _custom_tool(given)

    def renamed(self, names: Mapping[str, str]) -> Tool:
        """The tool with its new name, if `names` has one."""
        name = names.get(self.function.name, self.function.name)
        return self.model_copy(update={"function": self.function.model_copy(update={"name": name})})

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

    def renamed(self, names: Mapping[str, str]) -> NamedTool:
        """The choice with its tool's new name, if `names` has one."""
        name = names.get(self.function.name, self.function.name)
        return NamedTool(type=self.type, function=NamedFunction(name=name))


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

    def renamed(self, names: Mapping[str, str]) -> AllowedTools:
        """The choice with its tools' new names, where `names` has one."""
        tools = [tool.renamed(names) for tool in self.allowed_tools.tools]
        return AllowedTools(type="allowed_tools", allowed_tools=Allowed(mode=self.allowed_tools.mode, tools=tools))


ToolChoice = Annotated[NamedTool | AllowedTools | Literal["none", "auto", "required"], ByType()]


class CalledFunction(Body):
    """The function of an earlier call; `arguments` is a JSON object or its text."""

    IGNORED = ANSWERED

    name: Text
    arguments: JsonText = ""


class ToolCall(Body):
    """An earlier call that a client sends back."""

    IGNORED = ANSWERED | {"custom"}

    id: Text | None = None
    type: Literal["function", "custom"] = "function"
    function: CalledFunction
    prompt_cache_breakpoint: ExplicitBreakpoint | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(custom := given.get("custom"), dict):
            return given
        arguments = json.dumps({"input": custom.get("input") or ""}, ensure_ascii=False)
        return {**given, "function": {"name": custom.get("name"), "arguments": arguments}}

    def plain(self, mark: Mark = unmarked) -> list[dict[str, Any]]:
        """The call as a dict for the chat template. Arguments that are JSON are parsed; null stands for none.

        If `mark` returns a text, a second call with this name follows, which marks the breakpoint.
        """
        try:
            arguments = parse_json(self.function.arguments or "{}")
            arguments = {} if arguments is None else arguments
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
    images: Pictures | None = None,
) -> str:
    """The prompt of a conversation with tools; `variables`: the chat template's; `images`: those that contents have.

    Raises InvalidRequest.
    """
    if tools and "tools" not in (tokenizer.chat_template or ""):
        messages, tools = _described(messages, tools), []
    turns, described = fitted(tokenizer, messages), [tool.plain() for tool in tools] or None
    apply = partial(
        tokenizer.apply_chat_template,
        add_generation_prompt=add_generation_prompt,
        tools=described,
        variables=variables or {},
    )
    write = apply if images is None else partial(images.write, apply)
    try:
        return write(turns)
    except TemplateRefused:
        if (changed := mended(turns)) != turns:
            with suppress(InvalidRequest):
                return write(changed)
        raise


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
    """Messages with a system message that describes the tools, and with calls as text if the template has none."""
    messages = with_calls_as_text(tokenizer, messages)
    return _described(messages, tools) if tools else messages


def _described(messages: list[dict[str, Any]], tools: list[Tool]) -> list[dict[str, Any]]:
    signatures = "\n".join(json.dumps(tool.plain(), ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these functions:\n<tools>\n{signatures}\n</tools>\n"
        "To call one, write its name and its arguments as JSON between two tags:\n"
        f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}'
    )
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
