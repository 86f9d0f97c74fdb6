"""Conversations of Anthropic's routes as prompts, and the places up to which they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from runtime.frontend.output import MarkedText
from runtime.models.tokenizer import Tokenizer
from server.anthropic.types import (
    AnthropicMessage,
    CacheControl,
    MessagesPrompt,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.explain import parts
from server.generation.breakpoints import find_breakpoints
from server.openai.tools import Function, Tool, continue_chat, render_chat

# Writes a mark at the end of a block, if it has a breakpoint.
_Mark = Callable[[CacheControl | None], str]
_Turn = dict[str, Any]


def render(body: MessagesPrompt, tokenizer: Tokenizer) -> str | MarkedText:
    """The prompt of a conversation. Raises InvalidRequest."""
    text, found = find_breakpoints(partial(_render, body, tokenizer))
    return MarkedText(text, [(end, control.seconds) for end, control in found]) if found else text


def conversation_of(body: MessagesPrompt, tokenizer: Tokenizer) -> parts.Conversation:
    """The conversation that a prompt renders."""
    turns: list[_Turn] = [{"role": "system", "content": _joined(body.system, _unmarked)}] if body.system else []
    numbers = [-1] * len(turns)
    for number, message in enumerate(body.messages):
        made = list(_answer(message, _unmarked) if message.role == "assistant" else _question(message, _unmarked))
        turns += made
        numbers += [number] * len(made)
    variables, example = body.template_variables(), Tool(type="function", function=Function(name="example"))

    def write(shown: list[_Turn], tools: list[Tool]) -> str:
        return render_chat(tokenizer, shown, tools, True, variables)

    return parts.Conversation(write, turns, list(_tools(body, _unmarked)), example, numbers)


def _unmarked(control: CacheControl | None) -> str:
    return ""


def _render(body: MessagesPrompt, tokenizer: Tokenizer, mark: _Mark) -> str:
    tools, variables = list(_tools(body, mark)), body.template_variables()
    turns = list(_turns(body, mark))
    last = body.messages[-1]
    if last.role == "assistant" and not turns[-1].get("tool_calls"):
        return continue_chat(turns, lambda plain: render_chat(tokenizer, plain, tools, False, variables))
    return render_chat(tokenizer, turns, tools, True, variables)


def _tools(body: MessagesPrompt, mark: _Mark) -> Iterator[Tool]:
    """The tools; a tool more, whose name is a mark, follows one with a breakpoint."""
    for tool in body.offered:
        yield tool.described()
        if name := mark(tool.cache_control):
            function = Function.model_construct(name=name, description=None, parameters=None)
            yield Tool.model_construct(type="function", function=function)


def _turns(body: MessagesPrompt, mark: _Mark) -> Iterator[_Turn]:
    """The chat template's dicts of all messages."""
    if body.system:
        yield {"role": "system", "content": _joined(body.system, mark)}
    *earlier, last = body.messages
    if body.cache_control is not None and last.blocks:
        *before, block = last.blocks
        block = block.model_copy(update={"cache_control": block.cache_control or body.cache_control})
        last = last.model_copy(update={"content": [*before, block]})
    for message in (*earlier, last):
        yield from _answer(message, mark) if message.role == "assistant" else _question(message, mark)


def _joined(content: str | list[TextBlock], mark: _Mark) -> str:
    """Texts, each on lines of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text + mark(block.cache_control) for block in content)


def _question(message: AnthropicMessage, mark: _Mark) -> Iterator[_Turn]:
    """A user's turns: results of tools are turns of their own."""
    texts: list[str] = []
    for block in message.blocks:
        if isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": "\n".join(texts)}
                texts = []
            text = _joined(block.content or "", mark) + mark(block.cache_control)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        elif not isinstance(block, ThinkingBlock | RedactedBlock | ToolUseBlock):
            texts.append(block.text + mark(block.cache_control))
    if texts or not message.blocks:
        yield {"role": message.role, "content": "\n".join(texts)}


def _answer(message: AnthropicMessage, mark: _Mark) -> Iterator[_Turn]:
    """An assistant's turn: text, reasoning and calls. A call more, whose name is a mark, follows one to be kept."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(block.plain())
            if name := mark(block.cache_control):
                calls.append(ToolUseBlock(type="tool_use", id=name, name=name, input={}).plain())
        elif not isinstance(block, RedactedBlock):
            texts.append(block.text + mark(block.cache_control))
    turn: _Turn = {"role": "assistant", "content": "\n".join(texts)}
    yield (
        turn
        | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )
