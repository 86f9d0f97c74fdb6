"""Bodies that lack any part, or have null or another kind of value there, are read or refused: no other error."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from runtime.errors import InvalidRequest
from server.anthropic.types import MessagesRequest
from server.openai.types import ChatRequest
from server.responses.types import ResponseRequest

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
POINT = {"mode": "explicit", "ttl": "30m"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "messages": [
        {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": POINT}, {"type": "image_url"}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "prompt_cache_options": {"mode": "implicit", "ttl": "12h"},
    "stream_options": {"include_usage": True},
    "stream": True,
    "reuse": {"method": "none"},
    "cache": {"hold_s": 1.0},
    "logit_bias": {"1": 2},
}
MESSAGES = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"q": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]},
                {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
            ],
        },
    ],
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled"},
    "thread": {"type": "create"},
    "model": "m",
    "max_tokens": 4,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "item_reference", "id": "msg_1"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}, {"type": "custom", "name": "g"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "instructions": "Be brief.",
}


def changed(value: Any) -> Iterator[Any]:
    """Copies of a value that each lack one part, or have another value there."""
    if isinstance(value, dict):
        for name in value:
            yield {other: value[other] for other in value if other != name}
            for part in (None, 7, "x", [], {}, [None], *changed(value[name])):
                yield {**value, name: part}
    if isinstance(value, list):
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
            for part in (None, 7, "x", *changed(value[i])):
                yield [*value[:i], part, *value[i + 1 :]]


@pytest.mark.parametrize(
    ("body", "given"), [(ChatRequest, CHAT), (MessagesRequest, MESSAGES), (ResponseRequest, RESPONSE)]
)
def test_any_part_may_be_missing_or_of_another_kind(body, given):
    body.model_validate(given)
    for other in changed(given):
        with suppress(ValidationError, InvalidRequest):
            body.model_validate(other)
