"""Converts Anthropic's requests to OpenAI chats."""

import json
from typing import Any

from runtime.errors import InvalidRequest
from runtime.frontend.output import MAX_BREAKPOINTS
from server.anthropic import types
from server.generation.bodies import naming
from server.openai.caching import ExplicitBreakpoint
from server.openai.messages import Message, Part, TextPart, ThinkingPart
from server.openai.tools import CalledFunction, Function, Tool, ToolCall
from server.openai.types import ChatRequest


def chat_of(body: types.MessagesPrompt) -> ChatRequest:
    """The request as an OpenAI chat. Raises InvalidRequest."""
    for block in body.messages[-1].content[-1:]:
        block.cache_control = block.cache_control or body.cache_control
    tools = [_tool(tool) for tool in body.tools or () if isinstance(tool, types.AnthropicTool)]
    turns = _system(body) + [turn for message in body.messages for turn in turns_of(message)]
    parts = [part for turn in turns for several in (turn.content, turn.tool_calls) for part in several or ()]
    points = [getattr(part, "prompt_cache_breakpoint", None) for part in (*tools, *parts)]
    if (count := len(points) - points.count(None)) > MAX_BREAKPOINTS:
        raise InvalidRequest(f"{MAX_BREAKPOINTS} blocks may have cache_control, not {count}", param="cache_control")
    output = body.output_config or types.OutputConfig()
    form = output.format or body.output_format
    same = ChatRequest.model_fields.keys() & type(body).model_fields.keys() & body.model_fields_set
    fields = {name: getattr(body, name) for name in same} | {
        "messages": turns,
        "tools": tools or None,
        "tool_choice": None if body.tool_choice is None else _choice(body.tool_choice),
        "parallel_tool_calls": body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        "response_format": form and {"type": "json_schema", "schema": form.schema_},
        "reasoning_effort": output.effort,
        "enable_thinking": body.thinking and body.thinking.type != "disabled",
        "stop": getattr(body, "stop_sequences", None),
        "continue_final_message": turns[-1].role == "assistant" and not turns[-1].tool_calls,
        "prompt_cache_options": {"mode": "explicit"},
        "reuse": {"method": "none"},  # Anthropic's answers have no field that reports approximate reuse
    }
    with naming(body.NAMES):
        chat = ChatRequest.model_validate(fields)
        if chat.must_call:
            chat.refuse_unsupported()
        return chat


def numbers_of(body: types.MessagesPrompt) -> list[int]:
    """For each turn of the chat, the index of its Anthropic message; -1: the system message."""
    numbers = [i for i, message in enumerate(body.messages) for _ in turns_of(message)]
    return [-1] * len(_system(body)) + numbers


def _system(body: types.MessagesPrompt) -> list[Message]:
    blocks = body.system or []
    return [Message(role="system", content=_texts(blocks))] if any(block.text for block in blocks) else []


def turns_of(message: types.AnthropicMessage) -> list[Message]:
    """A message as turns of a chat, in which each tool result is a turn of its own."""
    turns: list[Message] = []
    parts: list[Part] = []
    calls: list[ToolCall] = []
    for block in message.content:
        if isinstance(block, types.ToolResultBlock):
            if parts:
                turns.append(Message(role=message.role, content=parts))
                parts = []
            texts = _texts(block.content or [types.TextBlock(type="text", text="")])
            texts[-1].prompt_cache_breakpoint = texts[-1].prompt_cache_breakpoint or _point(block)
            turns.append(Message(role="tool", tool_call_id=block.tool_use_id, content=texts))
        elif isinstance(block, types.ToolUseBlock):
            function = CalledFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            calls.append(ToolCall(id=block.id, function=function, prompt_cache_breakpoint=_point(block)))
        elif isinstance(block, types.ThinkingBlock):
            parts.append(ThinkingPart(type="thinking", thinking=block.thinking))
        elif not isinstance(block, types.RedactedBlock):
            parts += _texts([block])
    if parts or calls or not turns:
        turns.append(Message(role=message.role, content=parts, tool_calls=calls or None))
    return turns


def _texts(blocks: list[Any]) -> list[Any]:
    return [_part(block) for block in blocks]


def _part(block: Any) -> Part:
    if isinstance(block, types.ImageBlock):
        block.part.prompt_cache_breakpoint = _point(block)
        return block.part
    return TextPart(type="text", text=block.text, prompt_cache_breakpoint=_point(block))


def _point(block: types.MessageBlock | types.AnthropicTool) -> ExplicitBreakpoint | None:
    if block.cache_control is None:
        return None
    ttl: Any = block.cache_control.ttl  # not one of OpenAI's values, so validation is skipped
    return ExplicitBreakpoint.model_construct(mode="explicit", ttl=ttl)


def _tool(tool: types.AnthropicTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function, prompt_cache_breakpoint=_point(tool))


def _choice(choice: types.ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
